"""Sessions from a config: requests joined and split, failures of single requests, and failed loads."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto

from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InferenceFailed, InvalidConfig, RuntimeFailed
from nereid.vision.inference import network_file
from nereid.vision.inference.session import Session, SessionEvents
from nereid.vision.inference.session_options import CUDA_GRAPHS, BackendSettings
from tests.networks import assert_same, identity, parameter, store, tensor, written
from tests.tables import cases

# The variables that decide whether and where ONNX Runtime keeps usage data.
TELEMETRY = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
BATCHES = "max_batch_size: 8 instance_group { kind: KIND_CPU count: 1 }"
PICKED = BATCHES + tensor("input", "x", "INT64", [1]) + tensor("output", "y", "FP32", [1])
X, Y = tensor("input", "x", "FP32", [3]), tensor("output", "y", "FP32", [3])


DEFAULT_START = """
import sys
from nereid.vision.inference import session
import onnxruntime
onnxruntime.InferenceSession(sys.argv[1])
"""


def test_onnx_runtime_reports_no_usage(tmp_path):
    onnx.save(double(), tmp_path / "model.onnx")
    (home := tmp_path / "home").mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in TELEMETRY}

    command = [sys.executable, "-c", DEFAULT_START, tmp_path / "model.onnx"]
    subprocess.run(command, env=kept | {"HOME": str(home)}, check=True)

    assert not [*home.rglob("*")]


def double() -> ModelProto:
    """Build y = 2 x and its sums, float32[N, 3] to float32[N, 3] and float32[N, 1]."""
    io = "(float[N,3] x) => (float[N,3] y, float[N,1] sums) <int64[1] axes = {1}>"
    return written(f"{io} {{ y = Add(x, x) sums = ReduceSum(x, axes) }}")


@pytest.fixture
def open_model(tmp_path):
    return lambda model, text, **options: Session.from_config(stored(tmp_path, model, text), **options)


def stored(repository: Path, model: ModelProto, text: str = "", **options) -> ModelConfig:
    store(repository, "m", model, f'name: "m" backend: "onnxruntime" {text}', **options)
    return ModelConfig.from_file(repository / "m", 1)


def bounded(rows: int) -> str:
    sums = tensor("output", "sums", "FP32", [1])
    return BATCHES + X + Y + sums + parameter("nereid.run_batch_size", str(rows))


def counted(opening, *args) -> tuple[Session, list[int]]:
    ran: list[int] = []
    events = SessionEvents(on_run=lambda seconds, rows: ran.append(rows if seconds > 0 else -1))
    return opening(*args, events=events), ran


def texts(*values: str | bytes) -> np.ndarray:
    return np.array(values, object).reshape(-1, 1)


@pytest.mark.parametrize("run_batch_size", [0, 1, 2, 3])
@pytest.mark.parametrize("sizes", [[], [0], [5], [1, 1, 1, 1], [2, 3, 1, 2], [8]], ids=str)
def test_every_request_gets_its_own_rows_of_its_requested_outputs(open_model, run_batch_size, sizes):
    requests = [{"x": np.random.default_rng(i).random((n, 3), np.float32)} for i, n in enumerate(sizes)]
    requested = [["y", "sums"], ["sums"], [], ["y"]][: len(sizes)]

    answers = open_model(double(), bounded(run_batch_size)).run_requests(requests, requested)

    for request, names, answer in zip(requests, requested, answers, strict=True):
        x = request["x"]
        expected = {"y": 2 * x, "sums": x.astype(np.float64).sum(1, keepdims=True)}
        assert answer.keys() == {*names}
        for name, output in answer.items():
            assert (output.dtype, output.shape) == (np.float32, expected[name].shape)
            # Three float32 numbers below one: their sum in another order is off by a rounding.
            np.testing.assert_allclose(output, expected[name], rtol=0, atol=3e-7 if name == "sums" else 0)


@cases(
    no_bound=(0, [1, 2, 3], [6]),
    joined_up_to_it=(2, [1, 1, 1], [2, 1]),
    split=(2, [5], [2, 2, 1]),
    no_request_is_divided_to_fill_a_run=(3, [2, 2, 1], [2, 3]),
    long_one=(2, [3, 1], [2, 1, 1]),
)
def test_runs_are_bounded_and_reported(run_batch_size, sizes, runs, open_model):
    session, ran = counted(open_model, double(), bounded(run_batch_size))

    session.run_requests([{"x": np.zeros((n, 3), np.float32)} for n in sizes], [["y"]] * len(sizes))

    assert ran == runs


@pytest.mark.parametrize("run_batch_size", [0, 1, 2], ids=["joined", "alone", "in pairs"])
def test_failure_hits_only_the_request_at_fault(open_model, run_batch_size):
    """Only the rows of successful runs are reported, so a failure does not look like a fast network."""
    table = np.array([10, 20, 30, 40], np.float32)
    pick = written("(int64[N,1] x) => (float[N,1] y) { y = Gather(table, x) }", table=table)
    session, ran = counted(open_model, pick, PICKED + parameter("nereid.run_batch_size", run_batch_size))
    requests = [{"x": np.array(rows)} for rows in ([[0], [3]], [[9]], [[1]])]

    first, bad, last = session.run_requests(requests, [["y"]] * 3)

    assert_same(first, {"y": np.array([[10], [40]], np.float32)})
    assert_same(last, {"y": np.array([[20]], np.float32)})
    assert type(bad) is RuntimeFailed
    assert str(bad).startswith("onnx runtime error 2: Non-zero status code returned while running Gather")
    assert "idx=9 must be within the inclusive range [-4,3]" in str(bad)
    assert sum(ran) == 3


def test_requests_without_batches_run_one_by_one(open_model):
    config = tensor("input", "x", "INT64", [-1]) + tensor("output", "y", "INT64", [-1])
    session, ran = counted(open_model, identity("INT64", ["N"]), config)
    requests = [{"x": np.arange(n)} for n in (9, 0, 2)]

    for request, answer in zip(requests, session.run_requests(requests, [["y"]] * 3), strict=True):
        assert_same(answer, {"y": request["x"]})
    assert ran == [1, 1, 1]


@pytest.mark.parametrize("run_batch_size", [0, 1])
def test_strings_are_decoded_and_kept_whole(open_model, run_batch_size):
    io = tensor("input", "x", "STRING", [1]) + tensor("output", "y", "STRING", [1])
    bound = parameter("nereid.run_batch_size", run_batch_size)
    session = open_model(identity("STRING", ["N", 1]), BATCHES + io + bound)
    requests = [{"x": texts(b"", b"a\0b", b"\0")}, {"x": texts("naïve 日本".encode(), b"ends in \0")}]

    first, last = session.run_requests(requests, [["y"]] * 2)

    assert_same(first, {"y": texts("", "a\0b", "\0")})
    assert_same(last, {"y": texts("naïve 日本", "ends in \0")})


def open_ragged(open_model, run_batch_size: int) -> Session:
    """Open a network that takes all of a batch's `x` in a row, and where each request ends in it."""
    io = "(float[?] x, float[requests] n) => (float[?,?] y, float[requests,1] ends)"
    nodes = "row = Unsqueeze(x, zero) ends = Unsqueeze(n, one) shape = Shape(ends) y = Expand(row, shape)"
    model = written(f"{io} <int64[1] zero = {{0}}, int64[1] one = {{1}}> {{ {nodes} }}")
    config = (
        BATCHES
        + tensor("input", "x", "FP32", [-1], "allow_ragged_batch: true")
        + tensor("output", "y", "FP32", [-1])
        + tensor("output", "ends", "FP32", [1])
        + 'batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT source_input: "x" '
        + 'target_name: "n" data_type: TYPE_FP32 }'
    )
    return open_model(model, config + parameter("nereid.run_batch_size", run_batch_size))


@cases(
    joined=(0, [[[1, 2]], [[3]]], [([[1, 2, 3]], [[2]]), ([[1, 2, 3]], [[3]])]),
    apart=(1, [[[1, 2]], [[3]]], [([[1, 2]], [[2]]), ([[3]], [[1]])]),
    longer_than_a_run=(1, [[[1], [2]]], [([[1, 2]], [[2]])]),
)
def test_ragged_requests_are_joined_flat_and_never_divided(run_batch_size, requests, answers, open_model):
    arrays = [{"x": np.array(x, np.float32)} for x in requests]

    outcomes = open_ragged(open_model, run_batch_size).run_requests(arrays, [["y", "ends"]] * len(arrays))

    for outcome, (y, ends) in zip(outcomes, answers, strict=True):
        assert_same(outcome, {"y": np.array(y, np.float32), "ends": np.array(ends, np.float32)})


def test_batch_whose_output_cannot_be_split_is_run_one_by_one(open_model):
    text = "(float[N,3] x) => (float[M,3] y) { y = Compress<axis = 0>(x, first) }"
    session = open_model(written(text, first=np.array([True])), BATCHES + X + Y)
    requests = [{"x": np.full((1, 3), n, np.float32)} for n in (1, 2)]

    for request, answer in zip(requests, session.run_requests(requests, [["y"]] * 2), strict=True):
        assert_same(answer, {"y": request["x"]})


@cases(
    chosen_by_triton=("KIND_AUTO", "", False),
    named_by_the_config=("KIND_GPU", "", True),
    named_by_the_profile=("KIND_CPU", "gpu", True),
)
def test_gpu_is_replaced_by_the_cpu_unless_a_config_names_it(kind, profile, is_refused, tmp_path):
    """KIND_AUTO is served on the CPU if ONNX Runtime does not support the GPU."""
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime can use a GPU")
    config = stored(tmp_path, double(), BATCHES.replace("KIND_CPU", kind) + X + Y)
    (config.folder / "configs").mkdir()
    (config.folder / "configs" / "gpu.pbtxt").write_text("instance_group { kind: KIND_GPU }")
    refusal = pytest.raises(InvalidConfig, match="model 'm' needs CUDAExecutionProvider on GPU 0")

    with refusal if is_refused else nullcontext():
        session = Session.from_config(replace(config, device_kind="GPU"), BackendSettings(profile=profile))
        assert session.provider == "CPUExecutionProvider"


@cases(
    default=("", "model.onnx"),
    directory=("", "model.onnx/model.onnx"),
    filename_in_a_folder=('default_model_filename: "sub/net.onnx"', "sub/net.onnx"),
    named_directory=('default_model_filename: "net"', "net/model.onnx"),
    for_a_GPU_only=('cc_model_filenames { key: "9.0" value: "hopper.onnx" }', "model.onnx"),
)
def test_model_file_is_found(text, stored_as, tmp_path):
    config = stored(tmp_path, double(), BATCHES + X + Y + text, filename=stored_as)

    assert network_file.path_of(config) == tmp_path / "m" / "1" / stored_as


def test_request_whose_parts_cannot_be_joined_fails_alone(open_model):
    nodes = "first = Gather(x, zero) kept = Cast<to = 9>(first) y = Compress<axis = 1>(x, kept)"
    model = written(f"(float[N,3] x) => (float[N,M] y) <int64 zero = {{0}}> {{ {nodes} }}")
    one_by_one = parameter("nereid.run_batch_size", "1")
    session = open_model(model, BATCHES + X + tensor("output", "y", "FP32", [-1]) + one_by_one)

    requests = [{"x": np.float32(rows)} for rows in ([[1, 0, 0], [1, 1, 0]], [[0, 2, 0]])]
    bad, good = session.run_requests(requests, [["y"]] * 2)

    assert isinstance(bad, InferenceFailed)
    assert_same(good, {"y": np.array([[2]], np.float32)})


def test_network_that_cannot_be_recorded_runs_without_cuda_graphs(tmp_path, monkeypatch):
    refusal = "onnx runtime error 1: This session cannot use the graph capture feature as requested"
    open_real = network_file.open_configured

    def refuse_to_record(config, settings):
        if config.parameters[CUDA_GRAPHS] == "true":
            raise InvalidConfig(refusal)
        return open_real(config, settings)

    monkeypatch.setattr(network_file, "open_configured", refuse_to_record)
    text = BATCHES + X + Y + tensor("output", "sums", "FP32", [1]) + parameter(CUDA_GRAPHS, "true")
    session = Session.from_config(stored(tmp_path, double(), text))

    (y,) = session.run({"x": np.ones((2, 3), np.float32)}, ["y"])

    np.testing.assert_array_equal(y, np.full((2, 3), 2, np.float32))
    assert str(session).endswith(f", without CUDA graphs: {refusal}")
