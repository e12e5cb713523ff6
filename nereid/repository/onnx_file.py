"""ONNX files, read without running them: signature, opsets, external data and damage."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereid.base.errors import OperationFailed
from nereid.repository.onnx_graph import custom_domains, is_external, names, opsets, sort, tensors
from nereid.vision.inference.network_file import describe_other
from nereid.vision.inference.session_options import BackendSettings
from nereid.vision.inference.signature import NetworkTensor, Signature, complete, needs_completion

INSTALL = "pip install 'nereid-serving[publish]'"
# Limit of protobuf.
MAX_BYTES = 2**31 - 1
DEFAULT_MAX_BATCH_SIZE = BackendSettings().default_max_batch_size
# The newest operator set and IR version that each minor release of ONNX Runtime 1.x opens.
# Source: measured 2026-11-21 with the wheels of 1.24.4, 1.25.1, 1.26.0 to 1.30.0 and 1.31.1: a Relu of every
# opset and IR version was opened.
CAPABILITIES = {24: (25, 13), **dict.fromkeys(range(25, 32), (26, 13))}
# Source: triton-inference-server/server, pull 8918 (2026-08-05, for 26.08) sets 1.28, and pull 8966
# (2026-09-11, for 26.09) replaces 1.28.0. The image itself was not opened.
CONTAINER, CONTAINER_MINOR = "the container 26.08", 28
# Source: ONNX Runtime, docs/Versioning.md: opset 7 is the oldest that is supported.
MIN_OPSET = 7


class InvalidOnnx(OperationFailed):
    """The file is not an ONNX network, or cannot be served."""


@dataclass(frozen=True, slots=True)
class ExternalData:
    """The part of another file with the values of one tensor; `length` -1 means up to the end of the file."""

    tensor: str
    location: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """An ONNX file: `opsets` by domain, `external` its values in other files, `model` the ModelProto.

    `custom_domains` are the domains of operators that ONNX Runtime does not include.
    """

    path: Path
    sha256: str
    size_bytes: int
    ir_version: int
    opsets: Mapping[str, int]
    signature: Signature
    external: tuple[ExternalData, ...]
    custom_domains: tuple[str, ...]
    model: Any = field(repr=False, compare=False)

    @property
    def opset(self) -> int:
        """Return the version of the standard operators."""
        return self.opsets.get("", 0)


def network_path(folder: Path, document: Mapping[str, Any]) -> Path:
    """Return the path of the network in a version folder, for a model's config."""
    path = folder / (document.get("default_model_filename") or "model.onnx")
    return path / "model.onnx" if path.is_dir() else path


def read(path: Path) -> OnnxFile:
    """Read the ONNX file at `path` without values in other files.

    Raises:
        InvalidOnnx: the file is empty, truncated, damaged or not ONNX, or an input or output is not a tensor.
        OperationFailed: the `onnx` package is not installed.
    """
    onnx = _library()
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise _other_file(path, size, " of at most 2 GiB (the weights of a larger one are other files)")
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        raise InvalidOnnx(f"cannot read '{path}': {getattr(error, 'strerror', error)}") from None
    with _reported_as_damage(path):
        model = _parse(onnx, path, content)
        _check_text(path, model)
        for tensor in tensors(model):
            _check_element(onnx, tensor.name, tensor.data_type)
            _check_values(onnx, path, tensor)
        return OnnxFile(
            path=path,
            sha256=hashlib.sha256(content).hexdigest(),
            size_bytes=len(content),
            ir_version=model.ir_version,
            opsets=opsets(model),
            signature=_signature(onnx, model.graph),
            external=tuple(external_data(path, tensor) for tensor in tensors(model) if is_external(tensor)),
            custom_domains=custom_domains(model),
            model=model,
        )


def complete_document(document: dict[str, Any], signature: Callable[[], Signature]) -> None:
    """Complete a config in place from the network as the server does; `name` must be present.

    `signature` is called only if an entry is missing. InvalidConfig: the network does not support batches.
    """
    document.setdefault("max_batch_size", 0)
    if needs_completion(document):
        complete(document, signature(), DEFAULT_MAX_BATCH_SIZE, lambda warning: None)


def check_external_data(file: OnnxFile) -> int:
    """Check that values in other files are complete and next to the network; return the files' bytes."""
    folder = file.path.resolve().parent
    sizes = {data.location: _external_size(folder, data) for data in file.external}
    for data in file.external:
        end = data.offset + max(0, data.length)
        if sizes[data.location] < end:
            raise InvalidOnnx(
                f"'{data.location}': expected {end:,} bytes for tensor '{data.tensor}', "
                f"got {sizes[data.location]:,}; fix: copy the file again"
            )
    return sum(sizes.values())


@dataclass(frozen=True, slots=True)
class Runtime:
    """A server's ONNX Runtime, and the newest opset and IR version that it opens."""

    name: str
    opset: int
    ir_version: int


def supported_runtimes() -> tuple[Runtime, Runtime]:
    """Return the runtimes of the embedded server, which is the installed one, and of the container."""
    import onnxruntime

    installed = int(onnxruntime.__version__.split(".")[1])
    return (_runtime("the embedded server", installed), _runtime(CONTAINER, CONTAINER_MINOR))


def _runtime(name: str, minor: int) -> Runtime:
    # A release newer than the table opens at least the same networks as the last one in it.
    return Runtime(f"{name} (ONNX Runtime 1.{minor})", *CAPABILITIES[max(24, min(minor, max(CAPABILITIES)))])


def check_runtimes(file: OnnxFile, servers: Iterable[Runtime]) -> None:
    """Check that every server can open a network of this opset and IR version; else InvalidOnnx."""
    if file.opset < MIN_OPSET:
        actual = f"opset {file.opset}" if file.opset else "no opset"
        raise InvalidOnnx(f"'{file.path.name}': expected opset {MIN_OPSET} or later, got {actual}")
    problems = []
    for label, has, field_name in (
        ("opset", file.opset, "opset"),
        ("IR version", file.ir_version, "ir_version"),
    ):
        limits = [(runtime.name, getattr(runtime, field_name)) for runtime in servers]
        if short := [f"at most {limit} for {name}" for name, limit in limits if has > limit]:
            lowest = min(limit for _, limit in limits)
            problems.append(
                f"expected {label} {', '.join(short)}, got {has}; fix: export it with {label} {lowest}"
            )
    if problems:
        raise InvalidOnnx(f"'{file.path.name}': {'; '.join(problems)}")


def check_with_onnx(path: Path) -> None:
    """Check a file with ONNX's own checker, which finds unknown operators, for example.

    Its operators may be in any order, because ONNX Runtime sorts them; they must have one without a cycle.

    Raises:
        InvalidOnnx: the checker rejects the file; its message is on one line.
        OperationFailed: the `onnx` package is not installed.
    """
    onnx = _library()
    from onnx.checker import check_model

    try:
        model = onnx.load(path, load_external_data=False)
        # Without the path, the checker would not find external data.
        is_rewritten = sort(model) and not any(map(is_external, tensors(model)))
        check_model(model if is_rewritten else path)
    except Exception as error:  # its own class, or protobuf's
        words = " ".join(str(error).split())
        raise InvalidOnnx(f"the ONNX checker refuses '{path.name}': {words}") from None


def external_data(path: Path, tensor: Any) -> ExternalData:
    """Return the location of an external tensor's values, for the ONNX file at `path`; else InvalidOnnx."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", -1))
    except ValueError:
        offset = -1
    if offset < 0 or not entries.get("location"):
        raise InvalidOnnx(f"'{path.name}': external tensor '{tensor.name}' has no location of its values")
    return ExternalData(tensor.name, entries["location"], offset, length)


def describe(tensor: NetworkTensor) -> str:
    """Return a tensor as text, such as `FP32 [-1,3,224,224]`."""
    return f"{tensor.provided.removeprefix('TYPE_')} [{','.join(map(str, tensor.shape))}]"


def _library() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise OperationFailed(f"ONNX files need the package 'onnx' ({error}); fix: {INSTALL}") from None
    return onnx


@contextlib.contextmanager
def _reported_as_damage(path: Path) -> Iterator[None]:
    """Report Python's errors about the content as damage to the file."""
    try:
        yield
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidOnnx(f"'{path}' is damaged: {type(error).__name__}: {error}") from None


def _parse(onnx: Any, path: Path, content: bytes) -> Any:
    if not content:
        raise InvalidOnnx(f"'{path}' is empty (0 bytes)")
    try:
        model = onnx.ModelProto.FromString(content)
    except Exception:  # protobuf's implementations have different classes
        model = onnx.ModelProto()
    if not model.ir_version or not model.opset_import or not model.graph.node:
        raise _other_file(path, len(content))
    return model


def _other_file(path: Path, size: int, limit: str = "") -> InvalidOnnx:
    kind, fix = describe_other(path)
    return InvalidOnnx(f"'{path}': expected an ONNX network{limit}, got {kind} ({size:,} bytes); fix: {fix}")


def _check_element(onnx: Any, name: str, element: int) -> None:
    if element not in onnx.TensorProto.DataType.values():
        raise InvalidOnnx(f"'{name}' of the network has an unknown element type, {element}")


def _check_values(onnx: Any, path: Path, tensor: Any) -> None:
    """Refuse values in the file that do not fit the shape, because other readers fail on them."""
    if is_external(tensor) or tensor.data_type == onnx.TensorProto.STRING:
        return
    try:
        onnx.numpy_helper.to_array(tensor)
    except Exception as error:  # of several classes
        raise InvalidOnnx(
            f"'{path}' is damaged: expected values for shape {list(tensor.dims)} of tensor '{tensor.name}', "
            f"got: {error}"
        ) from None


def _check_text(path: Path, model: Any) -> None:
    """Refuse names that are not UTF-8, which other readers cannot parse."""
    for name in names(model):
        if isinstance(name, bytes):
            raise InvalidOnnx(f"'{path}' is damaged: expected a name in UTF-8, got {name!r}")


def _signature(onnx: Any, graph: Any) -> Signature:
    weights = {weight.name for weight in graph.initializer}
    weights |= {sparse.values.name for sparse in graph.sparse_initializer}
    graph_inputs = {tensor.name: _tensor(onnx, tensor) for tensor in graph.input}
    return Signature(
        inputs={name: tensor for name, tensor in graph_inputs.items() if name not in weights},
        outputs={output.name: _tensor(onnx, output) for output in graph.output},
        initializers={name: tensor for name, tensor in graph_inputs.items() if name in weights},
    )


def _tensor(onnx: Any, value: Any) -> NetworkTensor:
    if not value.name:
        raise InvalidOnnx("an input or output of the network: expected a name, got none")
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        actual = (kind or "none").removesuffix("_type")
        raise InvalidOnnx(f"'{value.name}' of the network: expected a tensor, got {actual}")
    declared = value.type.tensor_type
    _check_element(onnx, value.name, declared.elem_type)
    element = onnx.TensorProto.DataType.Name(declared.elem_type).lower()
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in declared.shape.dim)
    return NetworkTensor(element, shape)


def _external_size(folder: Path, data: ExternalData) -> int:
    """Return the size of the file; `folder` is resolved."""
    where = f"values of tensor '{data.tensor}' are in '{data.location}'"
    if not data.location.isprintable():
        raise InvalidOnnx(
            f"tensor '{data.tensor}': expected a file name for its values, got {data.location!r}"
        )
    location = Path(data.location)
    if location.is_absolute() or ".." in location.parts:
        raise InvalidOnnx(f"{where}, outside the network's folder; fix: save it with a plain file name")
    try:
        target = (folder / location).resolve()
        if not target.is_relative_to(folder):
            raise InvalidOnnx(f"{where}, a link to '{target}' outside the folder; fix: copy the file")
        if not target.is_file():
            raise InvalidOnnx(f"{where}, which is missing; fix: copy that file next to the network")
        return target.stat().st_size
    except (OSError, RuntimeError) as error:  # a link to itself is a RuntimeError
        raise InvalidOnnx(f"{where}, which cannot be read: {getattr(error, 'strerror', error)}") from None
