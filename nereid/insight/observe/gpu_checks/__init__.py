"""Checks of a machine with a GPU for `nereid doctor`."""
