"""ONNX Runtime sessions for Triton's Python-based backends."""

import os

# ONNX Runtime 1.29 and later report usage through a background thread and a growing file in ~/.cache,
# unless this variable is set before its first import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
