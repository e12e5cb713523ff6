"""The embedded Triton server: start, supervision, health and diagnosis."""
