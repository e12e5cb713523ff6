"""The benchmark: the cost of serving along each path, compared with the same work in process."""
