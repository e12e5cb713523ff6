"""Conversion of encoded images to tensors, and ONNX Runtime sessions."""
