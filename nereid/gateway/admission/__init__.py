"""Admission to the gateway: keys, quotas, and the limit of concurrent requests."""
