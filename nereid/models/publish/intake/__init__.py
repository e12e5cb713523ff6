"""Reading of a user's ONNX file: its form, its metadata, and the changes that make it a classifier."""
