"""Nereid: image models on a real NVIDIA Triton Inference Server."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nereid.client.async_classifier import AsyncClassifier
    from nereid.client.classifier import Classifier
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
    from nereid.client.prediction import Label, Prediction, Timings

    __version__: str

# Resolved on first use (PEP 562): Triton's stubs import this package, and must not pay for the client.
_HOMES = {
    "AsyncClassifier": "async_classifier",
    "Classifier": "classifier",
    **dict.fromkeys(("Label", "Prediction", "Timings"), "prediction"),
}

__all__ = [
    "AsyncClassifier",
    "Classifier",
    "ClassifierError",
    "Label",
    "Overloaded",
    "Prediction",
    "RequestRefused",
    "ServerFailed",
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
