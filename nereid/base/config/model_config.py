"""Model configurations: `config.pbtxt` as Triton passes it at load, or read from a file."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from nereid.base.config.parameters import Settings, parse_parameters
from nereid.base.config.server_flags import INSTANCES_BACKEND, backend_config_values, server_command_line
from nereid.base.errors import InvalidConfig

# A model's folder of per-profile configs.
CONFIGS = "configs"
_MESSAGES = "tritonclient.grpc.model_config_pb2"

# Datatypes with another name in NumPy, which has no BF16; Triton's clients use float32 for it.
_NUMPY_TYPES = {
    "TYPE_FP16": "float16",
    "TYPE_BF16": "float32",
    "TYPE_FP32": "float32",
    "TYPE_FP64": "float64",
    "TYPE_STRING": "object",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output: name, Triton datatype (`TYPE_FP32`), dims without the batch dimension.

    Clients see `dims`; the network sees `network_dims` (from the config's `reshape`).
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    network_dims: tuple[int, ...]
    is_optional: bool = False
    is_ragged: bool = False

    @property
    def numpy_type(self) -> str:
        """Return NumPy's name of the datatype: `float32`; `object` for strings."""
        return _NUMPY_TYPES.get(self.datatype, self.datatype.removeprefix("TYPE_").lower())

    @property
    def type_and_dims(self) -> str:
        """Return datatype and dims as shown in messages: `TYPE_FP32 [3, 224, 224]`."""
        return f"{self.datatype} {list(self.dims)}"

    def fits(self, other: "TensorSpec") -> bool:
        """Return whether one can be passed as the other: same datatype, and each dim equal or -1."""
        if (self.datatype, len(self.dims)) != (other.datatype, len(other.dims)):
            return False
        return all(-1 in pair or pair[0] == pair[1] for pair in zip(self.dims, other.dims, strict=True))


class ServedTensor(NamedTuple):
    """A tensor of a network: name, Triton datatype, dims without the batch, -1 for variable ones."""

    name: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The parts of a model configuration that the library uses.

    `folder` is the model's folder in the repository and `version` the numbered folder inside it. `parameters`
    holds the config's parameters as plain strings; `document` is the whole config, with protobuf field names.
    `device_kind` (CPU, GPU, MODEL), `device_id` and `is_first_instance` describe the instance.
    """

    name: str
    version: int
    folder: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    parameters: Mapping[str, str]
    document: Mapping[str, Any]
    device_kind: str = "CPU"
    device_id: int = 0
    is_first_instance: bool = True

    @classmethod
    def from_args(cls, args: Mapping[str, str], may_use_gpu: bool = False) -> "ModelConfig":
        """Read the `args` that Triton passes to `TritonPythonModel.initialize`.

        Raises:
            InvalidConfig: the instance runs on a GPU, which the backend does not support.
        """
        kind, device_id = args["model_instance_kind"], int(args["model_instance_device_id"])
        folder, version = Path(args["model_repository"]), int(args["model_version"])
        config = cls.from_document(json.loads(args["model_config"]), folder, version, kind, device_id)
        groups = config.document.get("instance_group") or [{}]
        config = replace(
            config, is_first_instance=args["model_instance_name"] == f"{groups[0].get('name')}_0"
        )
        fitted = backend_config_values(server_command_line(), INSTANCES_BACKEND).get(config.name)
        if fitted and kind == "CPU":  # more instances will follow
            count = max(config.cpu_instances, int(fitted))
            config = replace(config, document=with_instances(config.document, count))
        if kind == "GPU" and not may_use_gpu:
            raise InvalidConfig(f"model '{config.name}', instance group: expected KIND_CPU, got KIND_GPU")
        return config

    @classmethod
    def from_file(cls, folder: Path, version: int) -> "ModelConfig":
        """Read `folder/config.pbtxt` of a sibling model.

        Raises:
            InvalidConfig: the file is missing or not a ModelConfig; the message gives path, line and reason.
        """
        return cls.from_document(read_pbtxt(folder / "config.pbtxt"), folder, version)

    @classmethod
    def from_document(
        cls,
        document: Mapping[str, Any],
        folder: Path,
        version: int,
        device_kind: str = "CPU",
        device_id: int = 0,
    ) -> "ModelConfig":
        """Build a configuration from a dict with protobuf field names."""
        return cls(
            name=document.get("name") or folder.name,
            version=version,
            folder=folder,
            inputs=tuple(map(_tensor, document.get("input", ()))),
            outputs=tuple(map(_tensor, document.get("output", ()))),
            max_batch_size=int(document.get("max_batch_size", 0)),
            parameters={k: v.get("string_value", "") for k, v in document.get("parameters", {}).items()},
            document=document,
            device_kind=device_kind,
            device_id=device_id,
        )

    @property
    def cpu_instances(self) -> int:
        """Return the number of the model's instances that share the CPU cores.

        Source: core r24.10, model_config_utils.cc: the default is two for ONNX Runtime and one otherwise.
        """
        default = 2 if self.document.get("backend") == "onnxruntime" else 1
        groups = self.document.get("instance_group") or [{}]
        return sum(int(group.get("count") or default) for group in groups if group.get("kind") != "KIND_GPU")

    def requests_gpu(self, profile: str) -> bool:
        """Return whether the config file requests a GPU; Triton passes on KIND_AUTO as its own choice.

        Args:
            profile: the server's `--model-config-name`, or an empty string.
        """
        groups = read_config(self.folder, profile).get("instance_group", ())
        return any(group.get("kind") == "KIND_GPU" for group in groups)

    def sibling(self, name: str, version: int, profile: str = "") -> "ModelConfig":
        """Read the config of model `name` in the same repository, pinned to `version`.

        Args:
            profile: if given, read this profile's config, for this instance's device.

        Raises:
            InvalidConfig: the name points outside the repository, or the model or version does not exist.
        """
        folder = self._sibling_folder(name, version)
        if not profile:
            return ModelConfig.from_file(folder, version)
        document = read_config(folder, profile) or read_pbtxt(folder / "config.pbtxt")
        return ModelConfig.from_document(document, folder, version, self.device_kind, self.device_id)

    def with_parameters(self, parameters: Mapping[str, str]) -> "ModelConfig":
        """Return this config with some parameter values replaced."""
        return replace(self, parameters={**self.parameters, **parameters})

    def pinned_network_version(self, model: str, version: int, output: str) -> str:
        """Return the version of the network behind `version` of `model`, in the same repository.

        An ensemble pins its only network, or the one that produces `output`. The parameter `network_version`
        of a model pins that version. Any other model is itself a network.

        Raises:
            InvalidConfig: the name points outside the repository, the version does not exist, the model is
                itself a route (which would be a cycle), or an ensemble does not pin the network.
        """
        document = read_config(self._sibling_folder(model, version), profile="")
        if document.get("backend") == self.document.get("backend", ""):
            raise InvalidConfig(f"model '{self.name}' names '{model}', which is a route itself")
        if "ensemble_scheduling" not in document:
            pinned_text = document.get("parameters", {}).get("network_version", {}).get("string_value", "")
            return str(pinned_text or version)
        steps = document["ensemble_scheduling"].get("step", ())
        networks = [step for step in steps if self._is_network(step["model_name"])]
        for step in networks if len(networks) == 1 else steps:
            if len(networks) == 1 or output in step.get("output_map", {}).values():
                pinned = int(step.get("model_version", -1))
                if pinned < 1:
                    where = f"ensemble '{model}', step '{step['model_name']}'"
                    raise InvalidConfig(f"{where}: expected a pinned version, got {pinned}")
                return str(pinned)
        raise InvalidConfig(f"model '{self.name}' names '{model}', an ensemble without output '{output}'")

    def _is_network(self, model: str) -> bool:
        document = read_config(self.folder.parent / model, profile="")
        return document.get("backend") == "onnxruntime" or document.get("platform") == "onnxruntime_onnx"

    def _sibling_folder(self, name: str, version: int) -> Path:
        folder = self.folder.parent / name
        if folder.parent.resolve() != self.folder.parent.resolve() or name in ("", ".", ".."):
            raise InvalidConfig(
                f"model '{self.name}' names '{name}', which is not a folder of the repository"
            )
        if not (folder / str(version)).is_dir():
            raise InvalidConfig(
                f"model '{self.name}' names version {version} of '{name}', which is not there"
            )
        return folder

    def settings(self, schema: type[Settings], **fixed: Any) -> Settings:
        """Parse the parameters into the dataclass `schema`, using its field names and types.

        Args:
            schema: a field that is itself a dataclass is replaced by its own fields.
            fixed: values of the fields that are not parameters.

        Raises:
            InvalidConfig: a parameter is unknown or missing, or its value has the wrong type.
        """
        try:
            return parse_parameters(self.parameters, schema, fixed)
        except ValueError as error:
            raise InvalidConfig(f"model '{self.name}': {error}") from None


@dataclass(frozen=True, slots=True)
class FusedSettings:
    """Parameters of a `fused` model: the sibling models it combines, by name and pinned version.

    `after` is the model whose backend turns the network's outputs into this model's outputs, or empty.
    The numbers override parameters of these models; 0 keeps a model's own value. With `overlap_batches`, a
    GPU instance decodes one batch while the network computes the previous one.
    """

    preprocess: str
    preprocess_version: int
    network: str
    network_version: int
    after: str = ""
    after_version: int = 0
    decode_threads: int = 0
    intra_op_thread_count: int = 0
    run_batch_size: int = 0
    overlap_batches: bool = False

    @property
    def models(self) -> list[tuple[str, int]]:
        """Return the sibling models and their versions."""
        after = [(self.after, self.after_version)] if self.after else []
        return [(self.preprocess, self.preprocess_version), (self.network, self.network_version), *after]

    @property
    def preprocess_overrides(self) -> dict[str, str]:
        """Return the parameters that override the preprocessing model's own."""
        return _nonzero({"decode_threads": self.decode_threads})

    @property
    def network_overrides(self) -> dict[str, str]:
        """Return the parameters that override the network's own."""
        return _nonzero(
            {
                "intra_op_thread_count": self.intra_op_thread_count,
                "nereid.run_batch_size": self.run_batch_size,
            }
        )


def _nonzero(numbers: Mapping[str, int]) -> dict[str, str]:
    return {name: str(number) for name, number in numbers.items() if number}


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """Parameters of a route: the path of its route file, relative to the model repository."""

    route: str


def with_instances(document: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return a config with the given number of CPU instances."""
    return {**document, "instance_group": [{"kind": "KIND_CPU", "count": count}]}


def read_pbtxt(path: Path) -> dict[str, Any]:
    """Return a `config.pbtxt` as a dict with protobuf field names.

    Raises:
        InvalidConfig: the file is missing or not a ModelConfig; the message gives path, line and reason.
    """
    # Imported here because only models with siblings need it.
    from google.protobuf import json_format, text_format

    try:
        message = text_format.Parse(path.read_text(encoding="utf-8"), empty_config())
    except FileNotFoundError:
        raise InvalidConfig(f"unable to find '{path}'") from None
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"'{path}': {error}") from None
    return dict(json_format.MessageToDict(message, preserving_proto_field_name=True))


def config_path(folder: Path, profile: str) -> Path:
    """Return the file of a model's config for `profile`, or of its plain one, which may be missing."""
    named = folder / CONFIGS / f"{profile}.pbtxt"
    return named if profile and named.exists() else folder / "config.pbtxt"


def read_config(folder: Path, profile: str) -> dict[str, Any]:
    """Return a model's config for `profile`, or its plain one; empty if Triton auto-completes the config.

    Raises:
        InvalidConfig: the file is not a ModelConfig.
    """
    path = config_path(folder, profile)
    return read_pbtxt(path) if path.exists() else {}


def _tensor(entry: Mapping[str, Any]) -> TensorSpec:
    dims = tuple(map(int, entry.get("dims", ())))
    reshape = entry.get("reshape")
    return TensorSpec(
        name=entry["name"],
        datatype=entry.get("data_type", "TYPE_INVALID"),
        dims=dims,
        network_dims=dims if reshape is None else tuple(map(int, reshape.get("shape", ()))),
        is_optional=bool(entry.get("optional", False)),
        is_ragged=bool(entry.get("allow_ragged_batch", False)),
    )


def empty_config() -> Any:
    """Return an empty Triton ModelConfig without loading its gRPC client, which costs 10 MB per process."""
    if _MESSAGES not in sys.modules:
        # The import system would load the whole package `tritonclient.grpc` first.
        package = util.find_spec("tritonclient")
        assert package is not None, "tritonclient is a dependency"
        assert package.submodule_search_locations, "tritonclient is a package"
        path = Path(package.submodule_search_locations[0], *_MESSAGES.split(".")[1:]).with_suffix(".py")
        spec = util.spec_from_file_location(_MESSAGES, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        sys.modules[_MESSAGES] = module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[_MESSAGES].ModelConfig()
