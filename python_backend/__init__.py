"""What runs inside the server: a library, and in its sub-folders the backends that Triton loads."""

import os

# Since 1.29 ONNX Runtime on Linux tells its maker what it runs, by a thread and a growing file in ~/.cache,
# unless this is set before its first import: here, where all that imports it begins.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
