"""Nereid: image models on a real NVIDIA Triton Inference Server."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nereid.client.classifier_errors import (
        ClassifierError,
        Overloaded,
        RequestRefused,
        ServerFailed,
        TimedOut,
        Unavailable,
        Unreachable,
        UnusableImage,
    )
    from nereid.client.result_kind import Timings
    from nereid.tasks.classify.client import AsyncClassifier, Classifier
    from nereid.tasks.classify.result import Label, Prediction
    from nereid.tasks.detect.client import AsyncDetector, Detector
    from nereid.tasks.detect.result import DetectedObject, Detection
    from nereid.tasks.embed.client import AsyncEmbedder, Embedder
    from nereid.tasks.embed.result import Embedding
    from nereid.tasks.read.client import AsyncReader, Reader
    from nereid.tasks.read.result import Correction, Field, Reading, TextLine

    __version__: str

# Resolved on first use (PEP 562): Triton's stubs import this package, and must not pay for the client.
_HOMES = {
    "Timings": "nereid.client.result_kind",
    **dict.fromkeys(("AsyncClassifier", "Classifier"), "nereid.tasks.classify.client"),
    **dict.fromkeys(("AsyncDetector", "Detector"), "nereid.tasks.detect.client"),
    **dict.fromkeys(("AsyncEmbedder", "Embedder"), "nereid.tasks.embed.client"),
    **dict.fromkeys(("AsyncReader", "Reader"), "nereid.tasks.read.client"),
    **dict.fromkeys(("DetectedObject", "Detection"), "nereid.tasks.detect.result"),
    "Embedding": "nereid.tasks.embed.result",
    **dict.fromkeys(("Correction", "Field", "Reading", "TextLine"), "nereid.tasks.read.result"),
    **dict.fromkeys(("Label", "Prediction"), "nereid.tasks.classify.result"),
}

__all__ = [
    "AsyncClassifier",
    "AsyncDetector",
    "AsyncEmbedder",
    "AsyncReader",
    "Classifier",
    "ClassifierError",
    "Correction",
    "DetectedObject",
    "Detection",
    "Detector",
    "Embedder",
    "Embedding",
    "Field",
    "Label",
    "Overloaded",
    "Prediction",
    "Reader",
    "Reading",
    "RequestRefused",
    "ServerFailed",
    "TextLine",
    "TimedOut",
    "Timings",
    "Unavailable",
    "Unreachable",
    "UnusableImage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name == "__version__":
        from importlib.metadata import version

        return version("nereid-serving")
    if name not in __all__:
        raise AttributeError(f"module 'nereid' has no attribute '{name}'")
    home = _HOMES.get(name, "nereid.client.classifier_errors")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
