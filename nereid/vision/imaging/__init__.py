"""Preprocessing from encoded image bytes to network input tensors, on CPU and GPU."""
