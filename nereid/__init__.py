"""Nereid: image models on a real NVIDIA Triton Inference Server."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nereid.client.client_errors import (
        ClassifierError,
        NereidError,
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
    "NereidError",
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
    """Import a public name on its first use (PEP 562): Triton's stubs must not pay for the client."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("nereid-serving")
    if name not in __all__:
        raise AttributeError(f"module 'nereid' has no attribute '{name}'")
    homes = {
        public: f"tasks.{task.folder}.{module}"
        for task in importlib.import_module("nereid.base.task_registry").TASKS
        for module, names in task.public.items()
        for public in names
    }
    home = (homes | {"Timings": "client.result_kind"}).get(name, "client.client_errors")
    return getattr(importlib.import_module(f"nereid.{home}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
