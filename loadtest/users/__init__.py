"""The Locust users of a load test: schedule, requests, checks of responses, report and thresholds."""
