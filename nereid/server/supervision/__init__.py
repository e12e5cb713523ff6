"""Supervision of a running server: what is dead is found, reported and replaced."""
