"""The code that uses Triton's Python API, and the choice of a variant behind it."""
