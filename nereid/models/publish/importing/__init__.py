"""Reading of a user's ONNX file: its facts, its task, and the changes that make it fit the server."""
