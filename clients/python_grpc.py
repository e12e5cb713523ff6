"""Classify an image over gRPC with NVIDIA's `tritonclient`, on a variant that the caller names.

python clients/python_grpc.py IMAGE [HOST:PORT] [VARIANT]
"""

import sys
from pathlib import Path

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput

image, url = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "localhost:8001"
headers = {"x-variant": sys.argv[3]} if len(sys.argv) > 3 else {}

encoded = InferInput("image", [1, 1], "BYTES")
encoded.set_data_from_numpy(np.array([[image.read_bytes()]], dtype=object))
outputs = [InferRequestedOutput(name) for name in ("variant", "version", "route_reason")]

with InferenceServerClient(url) as client:
    response = client.infer(
        "classify",
        [encoded],
        outputs=[InferRequestedOutput("scores", class_count=3), *outputs],
        headers=headers,
    )

variant, version, reason = (response.as_numpy(output.name()).item().decode() for output in outputs)
for best in response.as_numpy("scores")[0]:
    probability, index, label = best.decode().split(":")
    print(f"{float(probability):.3f} {label} (class {index}, variant {variant}, version {version}, {reason})")
