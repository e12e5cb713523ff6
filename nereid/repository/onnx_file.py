"""What an ONNX file says of itself, read without running it, and which of the two supported_runtimes can run that."""

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereid.errors import OperationFailed, WrongUsage
from nereid.inference.session_options import BackendSettings
from nereid.inference.signature import NetworkTensor, Signature, complete, needs_completion

INSTALL = "pip install -e '.[publish]'"
# The newest operator set and IR version that each minor release of ONNX Runtime 1.x opens.
# Source: measured 2026-11-21 with the wheels of 1.24.4, 1.25.1, 1.26.0 to 1.30.0 and 1.31.1: a Relu of every
# opset and IR version was opened.
CAPABILITIES = {24: (25, 13), **dict.fromkeys(range(25, 32), (26, 13))}
# Source: triton-inference-server/server, pull 8918 (2026-08-05, for 26.08) sets 1.28, and pull 8966
# (2026-09-11, for 26.09) replaces 1.28.0. The image itself was not opened.
CONTAINER, CONTAINER_MINOR = "the container 26.08", 28
# Source: ONNX Runtime, docs/Versioning.md: opset 7 is the oldest that is supported.
OLDEST_OPSET = 7
DEFAULT_MAX_BATCH_SIZE = BackendSettings().default_max_batch_size
# Domains whose operators every ONNX Runtime brings along.
BUILT_IN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc"})


class InvalidOnnx(OperationFailed):
    """The file is no ONNX network, or not one that can be served; the message says why."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """A server that is to run the network, and the newest opset and IR version it opens."""

    name: str
    opset: int
    ir_version: int


@dataclass(frozen=True, slots=True)
class ExternalData:
    """A piece of another file that holds the values of one tensor; `length` -1: to the end of the file."""

    tensor: str
    location: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """An ONNX file: `opsets` by domain, `external` its values in other files, `model` the ModelProto.

    `custom_domains` are those of operators that ONNX Runtime does not bring along.
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
        """The version of the standard operators."""
        return self.opsets.get("", 0)


def supported_runtimes() -> tuple[Runtime, Runtime]:
    """Return the embedded server, which runs the installed ONNX Runtime, and the container."""
    import onnxruntime

    installed = int(onnxruntime.__version__.split(".")[1])
    return (
        _home("the embedded server", installed),
        _home(CONTAINER, CONTAINER_MINOR),
    )


def _home(name: str, minor: int) -> Runtime:
    # A release that is newer than the table runs at least what the last one in it does.
    return Runtime(f"{name} (ONNX Runtime 1.{minor})", *CAPABILITIES[max(24, min(minor, max(CAPABILITIES)))])


def network_path(folder: Path, document: Mapping[str, Any]) -> Path:
    """Return where the network of a version folder lies, as the config `document` has it."""
    path = folder / (document.get("default_model_filename") or "model.onnx")
    return path / "model.onnx" if path.is_dir() else path


def read(path: Path) -> OnnxFile:
    """Read the ONNX file at `path`; values in other files are not.

    Raises:
        InvalidOnnx: it is empty, truncated, no ONNX, or has an input or output that is no tensor, or what no
            network has, such as a name that is no text.
        OperationFailed: the `onnx` package is not installed.
    """
    onnx = _library()
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        raise InvalidOnnx(f"cannot read '{path}': {getattr(error, 'strerror', error)}") from None
    with _blamed(path):
        model = _parse(onnx, path, content)
        _check_text(path, model)
        for tensor in tensors(model):
            _check_element(onnx, tensor.name, tensor.data_type)
        return OnnxFile(
            path=path,
            sha256=hashlib.sha256(content).hexdigest(),
            size_bytes=len(content),
            ir_version=model.ir_version,
            opsets={_domain(each): each.version for each in model.opset_import},
            signature=_signature(onnx, model.graph),
            external=tuple(external_data(path, each) for each in tensors(model) if is_external(each)),
            custom_domains=_custom_domains(model),
            model=model,
        )


def complete_document(document: dict[str, Any], signature: Callable[[], Signature]) -> None:
    """Fill in what a config leaves to be read from the network, as the server does; `name` must be there.

    Args:
        signature: asked only if something is missing.

    Raises:
        InvalidConfig: it asks for batches, which the network cannot do.
    """
    document.setdefault("max_batch_size", 0)
    if needs_completion(document):
        complete(document, signature(), DEFAULT_MAX_BATCH_SIZE, lambda warning: None)


def check_external_data(file: OnnxFile) -> int:
    """Check that values in other files are beside the network and complete; returns the bytes of those files.

    Raises:
        InvalidOnnx: a file is elsewhere, missing, or shorter than the network says.
    """
    folder = file.path.resolve().parent
    sizes = {each.location: _external_size(folder, each) for each in file.external}
    for each in file.external:
        end = each.offset + max(0, each.length)
        if sizes[each.location] < end:
            raise InvalidOnnx(
                f"'{each.location}' must hold {end:,} bytes for tensor '{each.tensor}', "
                f"it has {sizes[each.location]:,}: truncated?"
            )
    return sum(sizes.values())


def check_with_onnx(path: Path) -> None:
    """Refuse what ONNX's own checker refuses, such as an operator that does not exist.

    Raises:
        InvalidOnnx: with the checker's words, on one line.
        OperationFailed: the `onnx` package is not installed.
    """
    _library()
    import onnx.checker

    try:
        onnx.checker.check_model(path)
    except Exception as error:  # its own class, and protobuf's
        words = " ".join(str(error).split())
        raise InvalidOnnx(f"ONNX's checker refuses '{path.name}': {words}") from None


def check_runtimes(file: OnnxFile, servers: Iterable[Runtime]) -> None:
    """Check that every server can open a network of this opset and IR version.

    Raises:
        InvalidOnnx: naming what is too new or too old, and for which server.
    """
    if file.opset < OLDEST_OPSET:
        found = f"opset {file.opset}" if file.opset else "no opset"
        raise InvalidOnnx(f"'{file.path.name}' has {found}: ONNX Runtime runs opset {OLDEST_OPSET} and later")
    problems = []
    for what, has, field_name in (
        ("opset", file.opset, "opset"),
        ("IR version", file.ir_version, "ir_version"),
    ):
        limits = [(each.name, getattr(each, field_name)) for each in servers]
        if short := [f"{name} takes {most} at most" for name, most in limits if has > most]:
            least = min(most for _, most in limits)
            problems.append(f"has {what} {has}, but {', '.join(short)}; export it with {what} {least}")
    if problems:
        raise InvalidOnnx(f"'{file.path.name}' {'; '.join(problems)}")


def tensors(model: Any) -> Iterator[Any]:
    """Yield every TensorProto of a ModelProto: weights and constants, also of subgraphs and functions."""
    for graph in _graphs(model.graph):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield sparse.values
    for node in _nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def is_external(tensor: Any) -> bool:
    """Tell whether the values of a TensorProto lie in another file."""
    return bool(tensor.data_location == 1)


def external_data(path: Path, tensor: Any) -> ExternalData:
    """Return where the values of a TensorProto lie, of the ONNX file at `path`, if they are external.

    Raises:
        InvalidOnnx: it does not say so.
    """
    entries = {each.key: each.value for each in tensor.external_data}
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", -1))
    except ValueError:
        offset = -1
    if offset < 0 or not entries.get("location"):
        raise InvalidOnnx(f"'{path.name}': tensor '{tensor.name}' does not say where its values lie")
    return ExternalData(tensor.name, entries["location"], offset, length)


def append_softmax(path: Path, output: str = "") -> str:
    """Append a softmax over the last dim to an ONNX file's output; returns the output's new name.

    Raises:
        WrongUsage: the file has several outputs, and `output` names none of them.
    """
    import onnx
    from onnx import helper

    model = onnx.load(path, load_external_data=False)
    found = [each for each in model.graph.output if output in ("", each.name)]
    if len(found) != 1:
        names = ", ".join(each.name for each in model.graph.output)
        raise WrongUsage(f"say with --output which one gives the scores: {names}")
    (logits,) = found
    used = {name for node in model.graph.node for name in (*node.input, *node.output)}
    name = next(
        n for n in ("probabilities", f"{logits.name}_probabilities", secrets.token_hex(8)) if n not in used
    )
    model.graph.node.append(helper.make_node("Softmax", [logits.name], [name], axis=-1))
    logits.name = name
    onnx.save(model, path)
    return name


def describe(tensor: NetworkTensor) -> str:
    """Write a tensor as `FP32 [-1,3,224,224]`."""
    return f"{tensor.provided.removeprefix('TYPE_')} [{','.join(map(str, tensor.shape))}]"


def _library() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise OperationFailed(f"reading ONNX files needs the package 'onnx' ({error}); {INSTALL}") from None
    return onnx


@contextlib.contextmanager
def _blamed(path: Path) -> Iterator[None]:
    """Blame the file for what Python raises of its content."""
    try:
        yield
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidOnnx(f"'{path}' is damaged: {type(error).__name__}: {error}") from None


def _domain(opset: Any) -> str:
    return "" if opset.domain == "ai.onnx" else str(opset.domain)


def _parse(onnx: Any, path: Path, content: bytes) -> Any:
    if not content:
        raise InvalidOnnx(f"'{path}' is empty (0 bytes)")
    try:
        model = onnx.ModelProto.FromString(content)
    except Exception:  # protobuf's implementations have different classes
        hint = "a text file" if _is_text(content) else "truncated, or no ONNX file"
        raise InvalidOnnx(f"'{path}' is no ONNX network ({len(content):,} bytes): {hint}") from None
    if not model.ir_version or not model.opset_import or not model.graph.node:
        raise InvalidOnnx(f"'{path}' is no ONNX network: no IR version, opset or operators in it; truncated?")
    return model


def _check_element(onnx: Any, name: str, element: int) -> None:
    if element not in onnx.TensorProto.DataType.values():
        raise InvalidOnnx(f"'{name}' of the network has element type {element}: no such")


def _check_text(path: Path, model: Any) -> None:
    """Refuse names that are not UTF-8, on which other readers break; protobuf gives them as bytes."""
    for name in _names(model):
        if isinstance(name, bytes):
            raise InvalidOnnx(f"'{path}' is damaged, it has a name that is no UTF-8 text: {name!r}")


def _names(model: Any) -> Iterator[Any]:
    yield from (each.domain for each in (*model.opset_import, *model.functions))
    for graph in _graphs(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            yield value.name
            yield from (each.dim_param for each in value.type.tensor_type.shape.dim)
    for tensor in tensors(model):
        yield tensor.name
        yield from (text for each in tensor.external_data for text in (each.key, each.value))
    for node in _nodes(model):
        yield from (node.op_type, node.domain, *node.input, *node.output)


def _is_text(content: bytes) -> bool:
    start = content[:1024]
    return b"\0" not in start and all(byte >= 32 or byte in b"\t\n\r\f" for byte in start)


def _signature(onnx: Any, graph: Any) -> Signature:
    weights = {each.name for each in graph.initializer}
    weights |= {each.values.name for each in graph.sparse_initializer}
    given = {each.name: _tensor(onnx, each) for each in graph.input}
    return Signature(
        inputs={name: each for name, each in given.items() if name not in weights},
        outputs={each.name: _tensor(onnx, each) for each in graph.output},
        initializers={name: each for name, each in given.items() if name in weights},
    )


def _tensor(onnx: Any, value: Any) -> NetworkTensor:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        found = (kind or "none").removesuffix("_type")
        raise InvalidOnnx(f"'{value.name}' of the network must be a tensor, got {found}")
    declared = value.type.tensor_type
    _check_element(onnx, value.name, declared.elem_type)
    element = onnx.TensorProto.DataType.Name(declared.elem_type).lower()
    shape = tuple(each.dim_value if each.HasField("dim_value") else -1 for each in declared.shape.dim)
    return NetworkTensor(element, shape)


def _external_size(folder: Path, data: ExternalData) -> int:
    """Return the size of the file; `folder` is resolved."""
    where = f"tensor '{data.tensor}' lies in '{data.location}'"
    if not data.location.isprintable():
        raise InvalidOnnx(f"tensor '{data.tensor}' lies in {data.location!r}: no characters of a file name")
    location = Path(data.location)
    if location.is_absolute() or ".." in location.parts:
        raise InvalidOnnx(f"{where}: it must lie beside the network, save it with a plain file name")
    try:
        target = (folder / location).resolve()
        if not target.is_relative_to(folder):
            raise InvalidOnnx(f"{where}, a link that leads out of the network's folder, to '{target}'")
        if not target.is_file():
            raise InvalidOnnx(f"{where}, which is not there: it belongs to the network, copy it, too")
        return target.stat().st_size
    except (OSError, RuntimeError) as error:  # a link to itself is a RuntimeError
        raise InvalidOnnx(f"{where}, which cannot be read: {getattr(error, 'strerror', error)}") from None


def _custom_domains(model: Any) -> tuple[str, ...]:
    known = BUILT_IN_DOMAINS | {function.domain for function in model.functions}
    return tuple(sorted({node.domain for node in _nodes(model)} - known))


def _nodes(model: Any) -> Iterator[Any]:
    for graph in _graphs(model.graph):
        yield from graph.node
    for function in model.functions:
        yield from function.node


def _graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph and those within it, such as the branches of an If."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _graphs(inner)
