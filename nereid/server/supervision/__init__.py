"""Supervision of a running server: dead parts are found, reported and replaced."""
