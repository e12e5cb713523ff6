"""A REST gateway in front of a Triton server: admission, keys, limits, and a web page."""
