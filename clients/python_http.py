"""Classify an image over HTTP with NVIDIA's `tritonclient`; nothing of Nereid is needed.

python clients/python_http.py IMAGE [HOST:PORT]
"""

import sys
from pathlib import Path

import numpy as np
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

image, url = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "localhost:8000"

encoded = InferInput("image", [1, 1], "BYTES")
encoded.set_data_from_numpy(np.array([[image.read_bytes()]], dtype=object))
outputs = [InferRequestedOutput("scores", class_count=3), InferRequestedOutput("variant")]

with InferenceServerClient(url) as client:
    response = client.infer("classify", [encoded], outputs=outputs)

variant = response.as_numpy("variant").item().decode()
for best in response.as_numpy("scores")[0]:
    probability, index, label = best.decode().split(":")
    print(f"{float(probability):.3f} {label} (class {index}, variant {variant})")
