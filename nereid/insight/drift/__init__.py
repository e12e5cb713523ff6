"""Comparison of the present traffic of a route with its reference."""
