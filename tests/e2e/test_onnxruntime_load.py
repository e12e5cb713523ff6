"""Loading ONNX models into the real server: refusals in NVIDIA's words, and configs that are completed."""

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tritonclient.grpc import InferenceServerClient, model_config_pb2
from tritonclient.utils import InferenceServerException

from nereid.server.embedded_server import EmbeddedServer
from tests.networks import (
    DATATYPES,
    ONE_INSTANCE,
    Dims,
    assert_same,
    connect,
    identity,
    infer,
    network,
    serve,
    store,
    tensor,
    value,
)

# Most of a load is waiting.
LOADS_AT_A_TIME = 6
# A watchdog: another thread than the one that gets the response reads the log.
LOG_S = 30
HAS_GPU = Path("/proc/driver/nvidia/version").exists()


@dataclass(frozen=True, slots=True)
class Case:
    """A model to load, and the expected result."""

    description: str
    model: onnx.ModelProto
    config: str | None
    expected: Any = None

    def __str__(self) -> str:
        return self.description

    @property
    def name(self) -> str:
        """The model's name, made of the description."""
        return re.sub(r"\W+", "_", self.description)


@dataclass(frozen=True, slots=True)
class Loader:
    """A running server with an open client, its log so far, and the loads in progress."""

    server: EmbeddedServer
    client: InferenceServerClient
    lines: list[str]
    loads: dict[str, Future[None]]

    def load(self, name: str) -> model_config_pb2.ModelConfig:
        """Wait for the load of a model, starting it if necessary; return the server's config of it."""
        self.loads[name].result() if name in self.loads else self.client.load_model(name)
        return self.client.get_model_config(name).config

    def refusal(self, name: str) -> str:
        """Load a model that cannot be loaded, and return the client's error message."""
        with pytest.raises(InferenceServerException) as refused:
            self.load(name)
        return refused.value.message()

    def logged_reason(self, name: str) -> str:
        """Return the first line of the reason in the server's log."""
        found = self.await_line(rf"failed to load '{name}' version 1: (.*?)(\\n|\"?$)")
        return found[1].replace('\\"', '"')

    def await_line(self, pattern: str) -> re.Match[str]:
        """Return the match in the first line of the log that has one."""
        deadline = time.monotonic() + LOG_S
        while True:
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n" + "\n".join(self.lines[-30:])
            time.sleep(0.05)


@pytest.fixture(scope="module")
def loader(request, tmp_path_factory):
    """A running server that loads the cases of all selected tests in the background."""
    lines: list[str] = []
    repository = tmp_path_factory.mktemp("models")
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    cases = [call["case"] for call in calls if isinstance(call.get("case"), Case)]
    with (
        serve(repository, tmp_path_factory.mktemp("run"), log=lines.append) as server,
        connect(server) as client,
        ThreadPoolExecutor(LOADS_AT_A_TIME) as pool,
    ):
        for case in cases:
            store(repository, case.name, case.model, case.config and ONE_INSTANCE + case.config)
        loads = {case.name: pool.submit(client.load_model, case.name) for case in cases}
        yield Loader(server, client, lines, loads)


@pytest.fixture
def repository(loader):
    """The folder of the models to load."""
    return loader.server.options.repository


def pair(datatype: str, dims: Dims, more: str = "") -> str:
    """Declare an input `x` and an output `y` alike."""
    return tensor("input", "x", datatype, dims, more) + tensor("output", "y", datatype, dims, more)


def total(inputs: dict[str, Dims], output: Dims) -> onnx.ModelProto:
    """Build a network that sums FP32 inputs of the given shapes to `y`."""
    return network(
        [helper.make_node("Sum", list(inputs), ["y"])],
        [value(name, "FP32", shape) for name, shape in inputs.items()],
        [value("y", "FP32", output)],
    )


def listing() -> onnx.ModelProto:
    """Build a network whose output is a sequence of tensors."""
    return network(
        [helper.make_node("SequenceConstruct", ["x"], ["y"])],
        [value("x", "FP32", [2])],
        [helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, [2])],
    )


def parameter(key: str, text: str) -> str:
    """Give a config a parameter."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}\n'


ROWS = identity("FP32", ["batch", 4])
BATCHED = "max_batch_size: 4\n" + pair("FP32", [4])
WITH_BIAS = total({"x": ["batch", 4], "bias": [4]}, ["batch", 4])

UNABLE = "unable to load model '{name}', "
NO_TENSOR = "Unsupported ONNX Type 'ONNX_TYPE_SEQUENCE' for I/O 'y', expected 'ONNX_TYPE_TENSOR'."
AUTOFILL_FAILED = (
    "autofill failed for model '{name}': model does not support batching while non-zero max_batch_size is "
    "specified"
)
NO_MODE = "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got 2 ."

# One case per part that refuses a config; tests/unit/test_signature.py and test_session_options.py have all.
REFUSED = [
    # NVIDIA's backend prints the datatype of the wire behind TYPE_.
    Case(
        "datatype of a string",
        identity("STRING", ["batch", 4]),
        BATCHED,
        UNABLE + "configuration expects datatype TYPE_FP32 for input 'x', model provides TYPE_BYTES",
    ),
    Case("no tensor and no config", listing(), None, NO_TENSOR),
    Case(
        "batch size for a network with one input that cannot",
        WITH_BIAS,
        "max_batch_size: 4\n" + tensor("output", "y", "FP32", [4]),
        AUTOFILL_FAILED,
    ),
    Case("execution mode", ROWS, BATCHED + parameter("execution_mode", "2"), NO_MODE),
]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_bad_config_is_refused_in_the_words_of_nvidia(loader, case):
    """The client gets the official text, and the log has it as the first line of the reason."""
    message = case.expected.format(name=case.name)

    refusal, reason = loader.refusal(case.name), loader.logged_reason(case.name)

    assert message in refusal
    assert reason.endswith(message)


LENIENT = Case(
    "lenient parameters",
    ROWS,
    BATCHED
    + "".join(
        parameter(key, text)
        for key, text in (
            ("intra_op_thread_count", "1abc"),
            ("execution_mode", "1"),
            ("enable_mem_arena", "ON"),
            ("cudnn_conv_algo_search", "9"),
            ("no_such_parameter", "abc"),
        )
    )
    + 'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }\n',
)


@pytest.mark.parametrize("case", [LENIENT], ids=str)
def test_lenience_is_that_of_nvidia(loader, case):
    """A value that NVIDIA's backend reads leniently, or ignores on a CPU, does not fail a load."""
    loader.load(case.name)

    assert loader.client.is_model_ready(case.name)


def test_missing_network_is_named_by_its_path(loader, repository):
    """Without `model.onnx` in a folder of that name, the message has the whole path."""
    name = "missing"
    path = store(repository, name, ROWS, ONE_INSTANCE + 'backend: "onnxruntime"\n' + BATCHED)
    path.unlink()
    path.mkdir()
    path /= "model.onnx"
    message = f"unable to find '{path}' for model instance '{name}'"

    refusal, reason = loader.refusal(name), loader.logged_reason(name)

    assert message in refusal
    assert reason.endswith(message)


def test_damaged_file_is_refused(loader, repository):
    """ONNX Runtime's own words say why, behind its number for a file it cannot parse."""
    path = store(repository, "broken", ROWS, ONE_INSTANCE + BATCHED)
    path.write_bytes(b"no protobuf")
    message = f"onnx runtime error 7: Load model from {path} failed"

    refusal, reason = loader.refusal("broken"), loader.logged_reason("broken")

    assert (message in refusal, message in reason) == (True, True)


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_gpu_instance_without_a_gpu_is_refused(loader, repository):
    """The core refuses the config before any backend sees it."""
    store(repository, "on_gpu", ROWS, "instance_group { kind: KIND_GPU count: 1 }\n" + BATCHED)

    assert "has kind KIND_GPU but no GPUs are available" in loader.refusal("on_gpu")


Tensors = dict[str, tuple[str, list[int], list[int] | None]]


def describe(config: model_config_pb2.ModelConfig, side: str) -> Tensors:
    """Return the inputs or outputs of a config: datatype, dims, and what they are reshaped to, if at all."""
    return {
        each.name: (
            model_config_pb2.DataType.Name(each.data_type),
            list(each.dims),
            list(each.reshape.shape) if each.HasField("reshape") else None,
        )
        for each in getattr(config, side)
    }


def batching(config: model_config_pb2.ModelConfig) -> tuple[int, list[int] | None]:
    """Return a config's batch size and those that its dynamic batcher prefers; None without a batcher."""
    batcher = config.dynamic_batching if config.HasField("dynamic_batching") else None
    return config.max_batch_size, batcher and list(batcher.preferred_batch_size)


X = {"x": ("TYPE_FP32", [4], None)}
Y = {"y": ("TYPE_FP32", [4], None)}
COMPLETED = [
    Case("no config", ROWS, None, ((4, [4]), X, Y)),
    Case(
        "own batcher",
        ROWS,
        "max_batch_size: 8\ndynamic_batching { preferred_batch_size: [ 2 ] }\n",
        ((8, [2]), X, Y),
    ),
    Case(
        "no batch dimension in one input",
        WITH_BIAS,
        "",
        (
            (0, None),
            {"x": ("TYPE_FP32", [-1, 4], None), "bias": ("TYPE_FP32", [4], None)},
            {"y": ("TYPE_FP32", [-1, 4], None)},
        ),
    ),
    Case(
        "nothing but a batch dimension",
        identity("STRING", ["batch"]),
        "",
        ((4, [4]), {"x": ("TYPE_STRING", [1], [])}, {"y": ("TYPE_STRING", [1], [])}),
    ),
    Case(
        "every datatype",
        network(
            [helper.make_node("Identity", [word], [f"of_{word}"]) for word in DATATYPES],
            [value(word, word, ["batch", 2]) for word in DATATYPES],
            [value(f"of_{word}", word, ["batch", 2]) for word in DATATYPES],
        ),
        "",
        (
            (4, [4]),
            {word: (f"TYPE_{word}", [2], None) for word in DATATYPES},
            {f"of_{word}": (f"TYPE_{word}", [2], None) for word in DATATYPES},
        ),
    ),
]


@pytest.mark.parametrize("case", COMPLETED, ids=str)
def test_config_is_completed_from_the_network(loader, case):
    """Batch size, batcher and each side that the config leaves out come from the file; no side is changed."""
    config = loader.load(case.name)

    assert (batching(config), describe(config, "input"), describe(config, "output")) == case.expected


def test_small_default_is_a_warning_in_the_words_of_nvidia(loader, repository):
    """The log says why batches have at most four images, and how to get larger ones."""
    store(repository, "warned", ROWS, ONE_INSTANCE)
    # Triton writes a line's level and its text apart: another load's line may come between the two.
    wait(loader.loads.values())
    loader.load("warned")

    message = "autofilled max_batch_size to 4 for model 'warned' since batching is supporrted but no "
    message += "max_batch_size is specified in model configuration. Must specify max_batch_size to utilize "
    message += "autofill with a larger max batch size"
    assert loader.await_line(f".*{re.escape(message)}")[0].startswith("W")


@pytest.mark.slow
def test_flags_of_the_server_are_obeyed(tmp_path):
    """The default batch size replaces the 4; a server without metrics still answers."""
    for folder in ("models", "run"):
        (tmp_path / folder).mkdir()
    store(tmp_path / "models", "rows", ROWS, ONE_INSTANCE)
    store(tmp_path / "models", "sized", ROWS, ONE_INSTANCE + "max_batch_size: 2\n")
    flags = "--backend-config=onnxruntime,default-max-batch-size=16", "--allow-metrics=false"
    inputs = {"x": np.ones((16, 4), np.float32)}

    with serve(tmp_path / "models", tmp_path / "run", *flags) as server, connect(server) as client:
        rows, sized = (client.get_model_config(name).config for name in ("rows", "sized"))
        assert_same(infer(server, "rows", inputs), {"y": inputs["x"]})

    assert (batching(rows), batching(sized)) == ((16, [16]), (2, [2]))
    assert describe(rows, "input") == X
