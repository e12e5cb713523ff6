"""The models of a repository as a server with one profile would load them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nereid.base.config.model_config import ModelConfig
from nereid.base.serving_errors import InvalidConfig
from nereid.repository import onnx_file
from nereid.repository.layout import backend_of, served_versions
from nereid.repository.onnx_file import OnnxFile


@dataclass(frozen=True, slots=True)
class NetworkCache:
    """The ONNX files of a repository, each read once."""

    read: dict[Path, OnnxFile | str] = field(default_factory=dict)

    def open(self, path: Path) -> OnnxFile:
        """Return the file, without its weights.

        Raises:
            InvalidConfig: it cannot be served.
        """
        if path not in self.read:
            try:
                file = onnx_file.read(path)
                onnx_file.check_external_data(file)
                onnx_file.check_runtimes(file, onnx_file.supported_runtimes())
                onnx_file.check_with_onnx(path)
                self.read[path] = replace(file, model=None)
            except onnx_file.InvalidOnnx as error:
                self.read[path] = str(error)
        found = self.read[path]
        if isinstance(found, str):
            raise InvalidConfig(found)
        return found


@dataclass(frozen=True, slots=True)
class Profile:
    """A repository in one profile: the config file that a server uses for each model, and its content."""

    root: Path
    files: Mapping[str, str]
    documents: Mapping[str, Mapping[str, Any]]
    networks: NetworkCache

    def backend(self, model: str) -> str:
        """Return the name of the backend that runs `model`."""
        return backend_of(self.root / model, self.documents[model])

    def versions(self, model: str) -> list[int]:
        """Return the versions of `model` that are served."""
        return served_versions(self.root / model, self.documents[model])

    def network(self, model: str, version: int) -> OnnxFile:
        """Return the network of a version.

        Raises:
            InvalidConfig: it is missing, or cannot be served.
        """
        document = self.documents[model]
        return self.networks.open(onnx_file.network_path(self.root / model / str(version), document))

    def config(self, model: str, version: int) -> ModelConfig:
        """Return the config of a version, completed like the server completes it.

        Raises:
            InvalidConfig: its network is needed and cannot be read.
        """
        document = {"name": model, **self.documents[model], "backend": self.backend(model)}
        if document["backend"] == "onnxruntime":
            onnx_file.complete_document(document, lambda: self.network(model, version).signature)
        return ModelConfig.from_document(document, self.root / model, version)
