"""What knows Triton's Python API, and the choice of a variant behind it."""
