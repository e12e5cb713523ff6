"""Nereid: image models on a real NVIDIA Triton Inference Server."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nereid.client.classifier import AsyncClassifier, Classifier
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
    from nereid.client.detector_client import AsyncDetector, Detector
    from nereid.client.prediction import Label, Prediction, Timings
    from nereid.client.reader_client import AsyncReader, Reader
    from nereid.client.results.detected_objects import DetectedObject, Detection
    from nereid.client.results.text_reading import Correction, Field, Reading, TextLine

    __version__: str

# Resolved on first use (PEP 562): Triton's stubs import this package, and must not pay for the client.
_HOMES = {
    **dict.fromkeys(("AsyncClassifier", "Classifier"), "classifier"),
    **dict.fromkeys(("AsyncDetector", "Detector"), "detector_client"),
    **dict.fromkeys(("AsyncReader", "Reader"), "reader_client"),
    **dict.fromkeys(("DetectedObject", "Detection"), "results.detected_objects"),
    **dict.fromkeys(("Correction", "Field", "Reading", "TextLine"), "results.text_reading"),
    **dict.fromkeys(("Label", "Prediction", "Timings"), "prediction"),
}

__all__ = [
    "AsyncClassifier",
    "AsyncDetector",
    "AsyncReader",
    "Classifier",
    "ClassifierError",
    "Correction",
    "DetectedObject",
    "Detection",
    "Detector",
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
    home = _HOMES.get(name, "classifier_errors")
    return getattr(importlib.import_module(f"nereid.client.{home}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
