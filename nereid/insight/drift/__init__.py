"""Comparison of a route's current traffic with its reference."""
