"""Read the text on an image over HTTP with NVIDIA's `tritonclient`; nothing of Nereid is needed.

python clients/python_read.py IMAGE [HOST:PORT]
"""

import sys
from pathlib import Path

import numpy as np
from tritonclient.http import InferenceServerClient, InferInput

image, url = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "localhost:8000"

encoded = InferInput("image", [1, 1], "BYTES")
encoded.set_data_from_numpy(np.array([[image.read_bytes()]], dtype=object))

with InferenceServerClient(url) as client:
    response = client.infer("read_text", [encoded])

# One entry per line, in reading order; an image without text has none.
texts, confidences, boxes = (response.as_numpy(name)[0] for name in ("text", "confidence", "box"))
for text, confidence, box in zip(texts, confidences, boxes, strict=True):
    (left, top), *_ = box
    print(f"{confidence:.3f} {text.decode()} (from {left:.0f}, {top:.0f})")
