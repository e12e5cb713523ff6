"""Routing decisions between variants: assignment, breakers, shadows and deadlines."""
