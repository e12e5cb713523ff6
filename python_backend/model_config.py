"""A model's `config.pbtxt`, read once: from Triton at load, or from a file for a sibling model."""

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from python_backend.errors import InvalidConfig

# Parameters that Triton reads itself; every backend lets them pass.
TRITON_PARAMETERS = frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"})

BOOLEANS = {"true": True, "false": False}

Settings = TypeVar("Settings")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output: name, Triton datatype (`TYPE_FP32`), dims without the batch dimension."""

    name: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the library needs of a model configuration.

    `folder` is the model's folder in the repository; `version` the numbered folder in it;
    `parameters` are the config's parameters as plain strings.
    """

    name: str
    version: int
    folder: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    parameters: Mapping[str, str]
    model_filename: str
    graph_level: int

    @classmethod
    def from_args(cls, args: Mapping[str, str]) -> "ModelConfig":
        """Read the `args` that Triton hands to `TritonPythonModel.initialize`.

        Raises:
            InvalidConfig: the instance is to run on a GPU, which no backend of this release does.
        """
        folder, version = Path(args["model_repository"]), int(args["model_version"])
        config = cls._from_dict(json.loads(args["model_config"]), folder, version)
        if args["model_instance_kind"] == "GPU":
            raise InvalidConfig(f"model '{config.name}': this release serves KIND_CPU instances only")
        return config

    @classmethod
    def from_file(cls, folder: Path, version: int) -> "ModelConfig":
        """Read `folder/config.pbtxt` of a sibling model.

        Raises:
            InvalidConfig: the file is missing or is no ModelConfig; the message has path, line and reason.
        """
        return cls._from_dict(read_pbtxt(folder / "config.pbtxt"), folder, version)

    @classmethod
    def _from_dict(cls, config: Mapping[str, Any], folder: Path, version: int) -> "ModelConfig":
        graph = config.get("optimization", {}).get("graph", {})
        return cls(
            name=config.get("name") or folder.name,
            version=version,
            folder=folder,
            inputs=tuple(map(_tensor, config.get("input", ()))),
            outputs=tuple(map(_tensor, config.get("output", ()))),
            max_batch_size=int(config.get("max_batch_size", 0)),
            parameters={k: v.get("string_value", "") for k, v in config.get("parameters", {}).items()},
            model_filename=config.get("default_model_filename") or "model.onnx",
            graph_level=int(graph.get("level", 0)),
        )

    def sibling(self, name: str, version: int) -> "ModelConfig":
        """Read the config of the model `name` beside this one, pinned to `version`.

        Raises:
            InvalidConfig: the name leaves the repository, or there is no such model or version.
        """
        folder = self._sibling_folder(name)
        self._check_version(name, version)
        return ModelConfig.from_file(folder, version)

    def pinned_network_version(self, model: str, version: int) -> str:
        """Return the version of the network that `version` of the ensemble `model` beside this one ends in.

        Raises:
            InvalidConfig: the name leaves the repository, or is no ensemble that pins what gives `scores`.
        """
        config = read_pbtxt(self._sibling_folder(model) / "config.pbtxt")
        self._check_version(model, version)
        for step in config.get("ensemble_scheduling", {}).get("step", ()):
            if "scores" in step.get("output_map", {}).values():
                pinned = int(step.get("model_version", -1))
                if pinned < 1:
                    raise InvalidConfig(f"ensemble '{model}' must pin '{step['model_name']}', got {pinned}")
                return str(pinned)
        raise InvalidConfig(
            f"model '{self.name}' names '{model}' as a variant, which is no ensemble with scores"
        )

    def _check_version(self, name: str, version: int) -> None:
        if not (self._sibling_folder(name) / str(version)).is_dir():
            raise InvalidConfig(
                f"model '{self.name}' names version {version} of '{name}', which is not there"
            )

    def _sibling_folder(self, name: str) -> Path:
        folder = self.folder.parent / name
        if folder.parent.resolve() != self.folder.parent.resolve() or name in ("", ".", ".."):
            raise InvalidConfig(f"model '{self.name}' names '{name}', which is not a folder beside it")
        return folder

    def settings(self, schema: type[Settings]) -> Settings:
        """Parse the parameters into the dataclass `schema`, by its field names and types.

        Raises:
            InvalidConfig: a parameter is unknown, missing, or not of its type.
        """
        known = {field.name: field for field in fields(schema)}  # type: ignore[arg-type]
        unknown = sorted(set(self.parameters) - set(known) - TRITON_PARAMETERS)
        if unknown:
            names = ", ".join(sorted(known))
            raise InvalidConfig(
                f"model '{self.name}' has unknown parameter '{unknown[0]}', known are: {names}"
            )
        missing = [n for n, f in known.items() if f.default is MISSING and n not in self.parameters]
        if missing:
            raise InvalidConfig(f"model '{self.name}' needs parameter '{missing[0]}'")
        hints = typing.get_type_hints(schema)
        given = {n: self._value(n, hints[n]) for n in known if n in self.parameters}
        try:
            return schema(**given)
        except ValueError as error:
            raise InvalidConfig(f"model '{self.name}': {error}") from None

    def _value(self, name: str, hint: Any) -> Any:
        text = self.parameters[name]
        try:
            return _convert(text, hint)
        except (ValueError, KeyError):
            expected = hint if isinstance(hint, types.GenericAlias) else hint.__name__
            raise InvalidConfig(
                f"model '{self.name}', parameter '{name}': expected {expected}, got '{text}'"
            ) from None


def read_pbtxt(path: Path) -> dict[str, Any]:
    """Return a `config.pbtxt` as a dict with protobuf field names.

    Raises:
        InvalidConfig: the file is missing or is no ModelConfig; the message has path, line and reason.
    """
    # Imported here: it brings the gRPC library along, which only the models that read siblings need.
    from google.protobuf import json_format, text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig as Message

    try:
        message = text_format.Parse(path.read_text(), Message())
    except FileNotFoundError:
        raise InvalidConfig(f"unable to find '{path}'") from None
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"'{path}': {error}") from None
    return dict(json_format.MessageToDict(message, preserving_proto_field_name=True))


def _tensor(entry: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(entry["name"], entry["data_type"], tuple(int(dim) for dim in entry.get("dims", ())))


def _convert(text: str, hint: Any) -> Any:
    if isinstance(hint, types.GenericAlias):
        return tuple(_convert(part.strip(), typing.get_args(hint)[0]) for part in text.split(","))
    if hint is bool:
        return BOOLEANS[text.lower()]
    return hint(text)
