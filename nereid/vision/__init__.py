"""Conversion of encoded bytes to tensors, and ONNX Runtime sessions."""
