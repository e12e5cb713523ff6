"""The state of a running server, for people and scripts."""
