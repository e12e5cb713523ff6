"""`python -m loadtest.bench`: what serving costs, along every path, against the same work in process."""
