"""Inputs and outputs of an ONNX file, and the rules for matching a config.pbtxt to them.

Source of every rule, and of most messages: onnxruntime_backend r24.10, src/onnxruntime.cc and
onnxruntime_utils.cc.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime

from nereid.base.config.model_config import ModelConfig, TensorSpec
from nereid.base.errors import InvalidConfig

EQUALLY_NAMED = "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "string"
DATATYPES = {
    **{name: f"TYPE_{name.upper()}" for name in EQUALLY_NAMED},
    "float16": "TYPE_FP16",
    "float": "TYPE_FP32",
    "double": "TYPE_FP64",
}
# ONNX Runtime's Python names for non-tensor types, mapped to NVIDIA's.
OTHER_TYPES = {"seq": "SEQUENCE", "map": "MAP", "optional": "OPTIONAL", "sparse_tensor": "SPARSETENSOR"}


@dataclass(frozen=True, slots=True)
class NetworkTensor:
    """An input or output of an ONNX file: its element type, and its shape with -1 for variable dims."""

    element: str
    shape: tuple[int, ...]

    @property
    def datatype(self) -> str:
        """Triton's datatype as spelled in a config, or `TYPE_INVALID` if Triton has none."""
        return DATATYPES.get(self.element, "TYPE_INVALID")

    @property
    def provided(self) -> str:
        """The datatype as spelled in messages; NVIDIA's call strings `BYTES`."""
        other = "BYTES" if self.element == "string" else self.element.upper()
        return f"TYPE_{other}" if self.datatype in ("TYPE_STRING", "TYPE_INVALID") else self.datatype

    @property
    def can_batch(self) -> bool:
        """Whether the first dimension can hold any number of rows."""
        return self.shape[:1] == (-1,)


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors of an ONNX file by name; `initializers` are weights that a request may override."""

    inputs: Mapping[str, NetworkTensor]
    outputs: Mapping[str, NetworkTensor]
    initializers: Mapping[str, NetworkTensor]

    @classmethod
    def of(cls, session: onnxruntime.InferenceSession) -> "Signature":
        """Read the signature of an open session.

        Raises:
            InvalidConfig: an input or output is not a tensor.
        """
        return cls(
            _tensors(session.get_inputs()),
            _tensors(session.get_outputs()),
            _tensors(session.get_overridable_initializers()),
        )


def needs_completion(document: Mapping[str, Any]) -> bool:
    """Return whether the config lacks inputs or outputs and must be completed."""
    has_inputs = bool(document.get("input") or document.get("batch_input"))
    return not (has_inputs and document.get("output"))


def complete(
    document: MutableMapping[str, Any],
    signature: Signature,
    default_max_batch_size: int,
    warn: Callable[[str], None],
) -> None:
    """Fill in `max_batch_size`, `dynamic_batching` and the missing inputs or outputs.

    Raises:
        InvalidConfig: the config sets `max_batch_size`, but the network does not support batching.
    """
    name = document["name"]
    if all(tensor.can_batch for tensor in (*signature.inputs.values(), *signature.outputs.values())):
        if not document.get("max_batch_size"):
            document["max_batch_size"] = default_max_batch_size
            warn(
                f"autofilled max_batch_size to {default_max_batch_size} for model '{name}' since batching is "
                "supporrted but no max_batch_size is specified in model configuration. Must specify "
                "max_batch_size to utilize autofill with a larger max batch size"
            )
        if document["max_batch_size"] > 1 and not {"sequence_batching", "dynamic_batching"} & document.keys():
            document["dynamic_batching"] = {}
    elif document.get("max_batch_size"):
        raise InvalidConfig(
            f"autofill failed for model '{name}': model does not support batching while non-zero "
            "max_batch_size is specified"
        )
    is_batching = document["max_batch_size"] > 0
    if not document.get("input"):
        document["input"] = _entries(signature.inputs, is_batching)
    if not document.get("output"):
        document["output"] = _entries(signature.outputs, is_batching)


def validate(config: ModelConfig, signature: Signature) -> None:
    """Check that a config fits the network.

    Raises:
        InvalidConfig: it does not.
    """
    sequence = config.document.get("sequence_batching", {})
    if sequence.get("state"):
        raise InvalidConfig(
            f"unable to load model '{config.name}', implicit state (sequence_batching.state) is not "
            "supported by a Python-based backend"
        )
    controls = sequence_controls(config)
    for control in controls:
        _check_control(config, control, signature.inputs.get(control.name))
    required = [tensor for tensor in config.inputs if not tensor.is_optional]
    targets = [name for entry in config.document.get("batch_input", ()) for name in entry["target_name"]]
    expected = len(required) + len(targets) + len(controls)
    if expected != len(signature.inputs):
        raise InvalidConfig(
            f"unable to load model '{config.name}', configuration expects {expected} inputs, model provides "
            f"{len(signature.inputs)}"
        )
    allowed = {**signature.inputs, **signature.initializers}
    for tensor in config.inputs:
        _check_input(config, tensor, _allowed("input", tensor.name, allowed))
    for target in targets:
        _allowed("input", target, allowed)
    scattered = {name for entry in config.document.get("batch_output", ()) for name in entry["target_name"]}
    for tensor in config.outputs:
        output = _allowed("output", tensor.name, signature.outputs)
        _check_datatype(config, "output", tensor, output)
        if tensor.name not in scattered:
            _check_shape(config, tensor, output.shape, is_exact=True)


def sequence_controls(config: ModelConfig) -> list[TensorSpec]:
    """Return the inputs that Triton's sequence batcher adds to every request."""
    controls = []
    for entry in config.document.get("sequence_batching", {}).get("control_input", ()):
        for control in entry.get("control", ()):
            datatypes = [key for key in ("int32", "fp32", "bool") if control.get(f"{key}_false_true")]
            datatype = f"TYPE_{datatypes[0].upper()}" if datatypes else control["data_type"]
            controls.append(TensorSpec(entry["name"], datatype, (1,), (1,)))
    return controls


def _tensors(nodes: Iterable[Any]) -> dict[str, NetworkTensor]:
    return {node.name: _tensor(node) for node in nodes}


def _tensor(node: Any) -> NetworkTensor:
    kind, _, element = node.type.removesuffix(")").partition("(")
    if kind != "tensor":
        other = OTHER_TYPES.get(kind, kind.upper())
        raise InvalidConfig(
            f"Unsupported ONNX Type 'ONNX_TYPE_{other}' for I/O '{node.name}', expected 'ONNX_TYPE_TENSOR'."
        )
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in node.shape)
    return NetworkTensor(element, shape)


def _entries(tensors: Mapping[str, NetworkTensor], is_batching: bool) -> list[dict[str, Any]]:
    entries = []
    for name, tensor in sorted(tensors.items()):
        dims = list(tensor.shape[1:] if is_batching else tensor.shape)
        entry: dict[str, Any] = {"name": name, "data_type": tensor.datatype, "dims": dims or [1]}
        if not dims and is_batching:
            entry["reshape"] = {"shape": []}
        entries.append(entry)
    return entries


def _allowed(side: str, name: str, tensors: Mapping[str, NetworkTensor]) -> NetworkTensor:
    if name not in tensors:
        allowed = ", ".join(sorted(tensors))
        raise InvalidConfig(f"unexpected inference {side} '{name}', allowed {side}s are: {allowed}")
    return tensors[name]


def _check_control(config: ModelConfig, control: TensorSpec, network_tensor: NetworkTensor | None) -> None:
    if network_tensor is None:
        raise InvalidConfig(
            f"configuration specified sequence control '{control.name}', but model does not provide that "
            "input"
        )
    dims = network_tensor.shape[1:] if config.max_batch_size else network_tensor.shape
    problem = f"unable to load model '{config.name}', sequence control '{control.name}'"
    if dims != (1,):
        raise InvalidConfig(f"{problem} in model has dims {_printed(dims)} but dims [1] is expected")
    if network_tensor.datatype != control.datatype:
        raise InvalidConfig(
            f"{problem}, the model expects data-type {network_tensor.element.upper()} but the model "
            f"configuration specifies data-type {control.datatype}"
        )


def _check_input(config: ModelConfig, tensor: TensorSpec, network_tensor: NetworkTensor) -> None:
    problem = f"unable to load model '{config.name}',"
    if tensor.is_optional and config.max_batch_size:
        raise InvalidConfig(
            f"{problem} optional input '{tensor.name}' is not supported for models that support batching"
        )
    _check_datatype(config, "input", tensor, network_tensor)
    if tensor.is_ragged and tensor.is_optional:
        raise InvalidConfig(
            f"{problem} configuration expects model provides input with shape [-1] for ragged input "
            f"'{tensor.name}', which is not supported for optional input"
        )
    if tensor.is_ragged:
        if network_tensor.shape != (-1,):
            raise InvalidConfig(
                f"{problem} configuration expects model provides input with shape [-1]  for ragged input "
                f"'{tensor.name}', model provides {_printed(network_tensor.shape)}"
            )
    else:
        _check_shape(config, tensor, network_tensor.shape, is_exact=False)


def _check_datatype(
    config: ModelConfig, side: str, tensor: TensorSpec, network_tensor: NetworkTensor
) -> None:
    if network_tensor.datatype == "TYPE_INVALID":
        raise InvalidConfig(
            f"model '{config.name}', {side} '{tensor.name}': expected a datatype of Triton's ONNX Runtime "
            f"backend, got {network_tensor.provided} from the network; fix: convert it to FP32 in the network"
        )
    if tensor.datatype not in DATATYPES.values():
        raise InvalidConfig(
            f"unsupported datatype {tensor.datatype} for {side} '{tensor.name}' for model '{config.name}'"
        )
    if tensor.datatype != network_tensor.datatype:
        raise InvalidConfig(
            f"unable to load model '{config.name}', configuration expects datatype {tensor.datatype} for "
            f"{side} '{tensor.name}', model provides {network_tensor.provided}"
        )


def _check_shape(config: ModelConfig, tensor: TensorSpec, shape: Sequence[int], is_exact: bool) -> None:
    """Compare dims; the config may fix a variable dim of an input, but not of an output (`is_exact`)."""
    dims = tensor.network_dims
    if not shape and not config.max_batch_size:
        if any(dim != 1 for dim in dims):
            raise InvalidConfig(
                f"unable to load model '{config.name}', scalar tensor '{tensor.name}', should only provide 1 "
                "in the model configuration when the model doesn't support batching. Model configuration "
                f"provided: {_printed(dims)}."
            )
        return
    problem = f"model '{config.name}', tensor '{tensor.name}'"
    if config.max_batch_size:
        if tuple(shape[:1]) != (-1,):
            raise InvalidConfig(
                f"{problem}: for the model to support batching the shape should have at least 1 dimension "
                f"and the first dimension must be -1; but shape expected by the model is {_printed(shape)}"
            )
        dims = (-1, *dims)
    pairs = zip(shape, dims, strict=False)
    if len(shape) != len(dims) or any(have != want and (is_exact or have != -1) for have, want in pairs):
        batch = ", the batch of max_batch_size included" if config.max_batch_size else ""
        raise InvalidConfig(
            f"{problem}: expected shape {_printed(shape)} of the network, got {_printed(dims)} from the "
            f"config{batch}; fix: dims: {_printed(shape[len(dims) - len(tensor.network_dims) :])}"
        )


def _printed(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
