"""Measurements, and the results they recorded."""
