"""Tiny networks for tests: built, stored in a repository, served, and run without a server to compare."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import tritonclient.grpc
import tritonclient.http
from onnx import helper, numpy_helper
from tritonclient.utils import np_to_triton_dtype

from nereid.server.command_line import ServerOptions
from nereid.server.embedded_server import EmbeddedServer
from nereid.server.ports import Ports, free_ports

OPSET, IR_VERSION = 17, 8
INTEGERS = [f"{sign}INT{bits}" for sign in ("U", "") for bits in (8, 16, 32, 64)]
# Triton's words (without TYPE_), each with NumPy's; a string is a `bytes` object here.
DATATYPES = {
    "BOOL": np.dtype(np.bool_),
    **{name: np.dtype(name.lower()) for name in INTEGERS},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "STRING": np.dtype(np.object_),
}
STRINGS = [b"plain", b"", b"a\0b", "naïve 日本".encode(), b"\0", b"ends in \0"]
# By default the core makes two CPU instances, and each is a process.
ONE_INSTANCE = "instance_group { kind: KIND_CPU count: 1 }\n"
CLIENTS = {"http": tritonclient.http, "grpc": tritonclient.grpc}

Dims = Sequence[int | str | None]
Arrays = dict[str, np.ndarray]


def value(name: str, datatype: str, shape: Dims) -> onnx.ValueInfoProto:
    """Declare a network's input or output; a dim that varies is a name or None."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(DATATYPES[datatype]), shape)


def constant(name: str, array: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def move_out(tensor: onnx.TensorProto, location: str) -> None:
    """Declare that a tensor's values are in another file."""
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)


def network(
    nodes: Iterable[onnx.NodeProto],
    inputs: Iterable[onnx.ValueInfoProto],
    outputs: Iterable[onnx.ValueInfoProto],
    initializers: Iterable[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "network", list(inputs), list(outputs), list(initializers))
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="tests"
    )
    onnx.checker.check_model(model)
    return model


def written(
    graph: str, opset: int = OPSET, ir_version: int = IR_VERSION, /, **weights: np.ndarray
) -> onnx.ModelProto:
    """Build a network from ONNX's text form, such as `(float[N,3] x) => (float[N,3] y) { y = Relu(x) }`."""
    head = f'ir_version: {ir_version}, opset_import: ["": {opset}], producer_name: "tests"'
    model = onnx.parser.parse_model(f"<{head}> network {graph}")
    model.graph.initializer.extend(constant(*item) for item in weights.items())
    onnx.checker.check_model(model)
    return model


def identity(datatype: str, shape: Dims) -> onnx.ModelProto:
    """Build the network whose output `y` is its input `x`."""
    x, y = (value(name, datatype, shape) for name in "xy")
    return network([helper.make_node("Identity", ["x"], ["y"])], [x], [y])


def tensor(side: str, name: str, datatype: str, dims: Dims, more: str = "") -> str:
    """Declare an `input` or `output` in a config; a dim that varies is -1."""
    sizes = [dim if isinstance(dim, int) else -1 for dim in dims]
    return f'{side} {{ name: "{name}" data_type: TYPE_{datatype} dims: {sizes} {more} }}\n'


def parameter(key: str, text: object) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}\n'


def store(
    repository: Path,
    name: str,
    model: onnx.ModelProto,
    config: str | None = "",
    version: int = 1,
    filename: str = "model.onnx",
    weights: str = "",
) -> Path:
    """Write a model's folder and return the path of its network.

    `config` is None for no such file; `weights` names a file next to the network for its initializers.
    """
    path = repository / name / str(version) / filename
    path.parent.mkdir(parents=True, exist_ok=True)
    if weights:
        onnx.save(model, path, save_as_external_data=True, location=weights, size_threshold=0)
    else:
        onnx.save(model, path)
    if config is not None:
        (repository / name / "config.pbtxt").write_text(config)
    return path


def sample(datatype: str, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Draw an array from a datatype's whole range: extremes, infinities, NaN and awkward strings included."""
    dtype = DATATYPES[datatype]
    if dtype.kind == "O":
        return np.resize(rng.permutation(np.array(STRINGS, dtype)), shape)
    if dtype.kind == "f":
        array = (rng.standard_normal(shape) * 100).astype(dtype)
        special = rng.choice([np.nan, np.inf, -np.inf, -0.0], shape).astype(dtype)
        return np.where(rng.random(shape) < 0.1, special, array)
    drawn: Any = np.uint8 if dtype.kind == "b" else dtype
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(drawn).min, np.iinfo(drawn).max)
    return np.asarray(rng.integers(low, high, shape, drawn, endpoint=True)).astype(dtype)


def run(network: Path | bytes, inputs: Mapping[str, np.ndarray]) -> Arrays:
    session = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
    decode, encode = np.vectorize(bytes.decode, "O"), np.vectorize(str.encode, "O")
    results = session.run(None, {name: _convert(array, decode) for name, array in inputs.items()})
    names = [output.name for output in session.get_outputs()]
    return {name: _convert(np.asarray(array), encode) for name, array in zip(names, results, strict=True)}


def serve(
    repository: Path,
    run_dir: Path,
    *flags: str,
    log: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> EmbeddedServer:
    """Build a server on free ports; `flags` are Triton's, and `settings` those of `ServerOptions`."""
    options = ServerOptions(repository, ports=Ports(*free_ports(3)), flags=flags, **settings)
    return EmbeddedServer(options, run_dir, os.environ, log)


def connect(
    server: EmbeddedServer, protocol: str = "grpc"
) -> tritonclient.grpc.InferenceServerClient | tritonclient.http.InferenceServerClient:
    options = server.options
    return CLIENTS[protocol].InferenceServerClient(f"{options.host}:{getattr(options.ports, protocol)}")


def client_input(protocol: str, name: str, array: np.ndarray) -> Any:
    """Return a client's input with the values of an array."""
    made = CLIENTS[protocol].InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def infer(
    server: EmbeddedServer,
    model: str,
    inputs: Mapping[str, np.ndarray],
    protocol: str = "grpc",
    outputs: Iterable[str] = (),
    **options: Any,
) -> Arrays:
    """Return a served model's response by output name; `options` are the client's, no `outputs` are all."""
    tensors = [client_input(protocol, *item) for item in inputs.items()]
    requested = [CLIENTS[protocol].InferRequestedOutput(name) for name in outputs] or None
    with connect(server, protocol) as client:
        return arrays_of(client.infer(model, tensors, outputs=requested, **options))


def arrays_of(result: Any) -> Arrays:
    response = result.get_response()
    outputs = response["outputs"] if isinstance(response, dict) else response.outputs
    names = [output["name"] if isinstance(output, dict) else output.name for output in outputs]
    return {name: result.as_numpy(name) for name in names}


def infer_together(
    server: EmbeddedServer, model: str, requests: Sequence[Mapping[str, np.ndarray]]
) -> list[Arrays | Exception]:
    """Send requests at the same time; returns their responses or errors, in order."""

    def outcome(inputs: Mapping[str, np.ndarray]) -> Arrays | Exception:
        try:
            return infer(server, model, inputs)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(outcome, requests))


def assert_same(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Assert that two responses have the same tensors: names, datatypes, shapes and every value."""
    assert set(actual) == set(expected)
    for name, array in expected.items():
        assert (name, actual[name].dtype, actual[name].shape) == (name, array.dtype, array.shape)
        np.testing.assert_array_equal(actual[name], array, name)


def _convert(array: np.ndarray, convert: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Convert strings and leave all else as it is; `np.vectorize` takes no empty array."""
    return convert(array) if array.dtype.kind == "O" and array.size else array
