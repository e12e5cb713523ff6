"""Examination of a candidate network in a separate process."""
