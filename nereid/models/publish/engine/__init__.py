"""Journaled actions of a publish operation, which can be resumed or undone."""
