"""Examination of a candidate network in a process of its own."""
