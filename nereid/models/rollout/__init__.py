"""Rollouts: a candidate gets a growing share of a route's traffic while its metrics are good enough."""
