"""The soak test: mixed traffic, changing versions and routes, and an evaluation of what remains."""
