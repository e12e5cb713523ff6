"""Attacks on a guarded server: known ones, and random changes of real requests."""
