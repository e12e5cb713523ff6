"""Commands of rollouts."""
