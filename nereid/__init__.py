"""Nereid: image models on a real NVIDIA Triton Inference Server."""
