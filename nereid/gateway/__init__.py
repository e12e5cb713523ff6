"""The HTTP gateway: REST API, keys, quotas, admission control and the web page."""
