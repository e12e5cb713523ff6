"""Rollouts: a candidate gets a growing share of a route's traffic while its numbers are good enough."""
