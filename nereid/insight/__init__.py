"""Observation of a running server: its state, its drift, and the best settings for it."""
