"""Adapters to Triton's Python API: tensors, responses, metrics and session setup."""
