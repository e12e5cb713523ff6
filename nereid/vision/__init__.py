"""Encoded bytes to tensors, and ONNX Runtime's sessions."""
