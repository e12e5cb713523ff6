"""Classify an image that the server reads from this machine's shared memory.

Needs `nereid serve --allow-shm` on the same machine.

python clients/python_shared_memory.py IMAGE [HOST:PORT]
"""

import sys

from nereid import Classifier

image, url = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "localhost:8001"

with Classifier(url, shared_memory="system") as classifier:
    prediction = classifier.classify(image, top_k=3)

for label in prediction.labels:
    print(f"{label.score:.3f} {label.name} (class {label.index}, variant {prediction.variant})")
