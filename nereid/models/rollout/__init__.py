"""Rollouts: a candidate gets more and more of a route's traffic while its numbers are good enough."""
