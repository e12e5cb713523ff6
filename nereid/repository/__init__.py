"""Model repositories on disk: layout, configs, ONNX files, labels and checks."""
