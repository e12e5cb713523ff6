"""Journaled steps of a publish operation, which can be resumed or undone."""
