"""Publishing under load, a publisher that is killed once, and a network from file to served scores."""

import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from nereid.assets import SAMPLES
from nereid.client.classifier import Classifier
from nereid.publish.add import AddRequest, add
from nereid.publish.publisher import retire, rollback
from nereid.repository.layout import versions_there
from nereid.routes.change import Superseded, change, reweighted
from nereid.routes.served import RunningServer
from nereid.routes.target import find_route
from nereid.server import run_dir
from nereid.server.run_dir import ServerRecord
from tests.e2e.conftest import group_members
from tests.networks import infer, run
from tests.proof import IS_PROOF
from tests.publishing import (
    NET,
    ROUTE,
    candidate,
    publish_number,
    record_of,
    store_published,
)
from tests.routes import Load, RouteResponse, serve_routes

pytestmark = pytest.mark.slow
# `make proof` runs 100 cycles; CI runs five.
CYCLES = 100 if IS_PROOF else 5
# Channels of the network's first layer: those of ResNet-50, or a quarter in CI.
WIDTH = 64 if IS_PROOF else 16
CALLERS = 8
SETTLED = 10
GROWTH = 1.10


@pytest.fixture
def served(tmp_path):
    """A server of `net` in version 1, behind route `r`."""
    repository = tmp_path / "models"
    store_published(repository)
    with serve_routes(repository, tmp_path) as running:
        yield running


def memory_bytes(leader: int) -> int:
    """Return the memory of a process group, its shared pages counted once."""
    pages = (Path(f"/proc/{pid}/smaps_rollup") for pid in group_members(leader))
    texts = (page.read_text() for page in pages if page.exists())
    return sum(int(kb) * 1024 for text in texts for kb in re.findall(r"^Pss: +(\d+) kB", text, re.M))


def is_right(answer: RouteResponse | Exception) -> bool:
    """Return whether a response is that of its reported version."""
    return isinstance(answer, RouteResponse) and answer.added == float(answer.origin[1])


def test_publishing_and_rolling_back_under_load_loses_nothing(served, tmp_path):
    """Versions come and go under the load of eight clients: all responses are correct, memory is constant."""
    record, repository, memory = record_of(served.server), served.repository, []

    with Load(served, ROUTE, CALLERS) as load, fidgeting(repository, record):
        for number in range(2, CYCLES + 2):
            done = publish_number(repository, tmp_path, record, number, share=0.5)
            load.wait_for(lambda o, n=number: isinstance(o.answer, RouteResponse) and o.answer.added == n)
            rollback(repository, NET, record)
            retire(repository, NET, done.version, record)
            memory.append(memory_bytes(served.server.pid))

    wrong = [outcome.answer for outcome in load.outcomes if not is_right(outcome.answer)]
    assert wrong == []
    assert {outcome.answer.origin[0] for outcome in load.outcomes} >= {f"v{n}" for n in range(1, CYCLES + 2)}
    assert versions_there(repository / NET) == [1]
    if CYCLES > 2 * SETTLED:
        assert np.median(memory[-SETTLED:]) <= GROWTH * np.median(memory[SETTLED : 2 * SETTLED])


@contextmanager
def fidgeting(repository: Path, record: ServerRecord) -> Iterator[None]:
    """Change the weight of variant `v1` continually, as another operator might."""
    is_over = threading.Event()

    def change_on() -> None:
        for weight in itertools.cycle((100, 101)):
            with suppress(Superseded):  # by the publisher
                change(find_route(repository, ROUTE), reweighted({"v1": weight}), RunningServer(record))
            if is_over.wait(0.2):
                return

    thread = threading.Thread(target=change_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def killed_after(line: str, command: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Run a command, and kill it once its progress has a line that begins like this."""
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert any(each.startswith(line) for each in process.stderr), "it ended before"
        process.kill()
    yield


def test_killed_publisher_is_completed_under_load(served, tmp_path):
    """The next command completes a publication that was killed after its first step; no request fails."""
    record, repository = record_of(served.server), served.repository
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "NEREID_REPOSITORY": str(repository)}
    words = ["publish", NET, str(candidate(tmp_path, 2)), "--accept-change", "--max-slowdown", "100"]
    with run_dir.occupy(run_dir.root(environment), repository) as folder, Load(served, ROUTE, 2) as load:
        run_dir.write(folder, record)
        command = [sys.executable, "-m", "nereid", *words]
        with killed_after(f"{NET}/2: added", command, environment):
            assert versions_there(repository / NET) == [1, 2]

        assert publish_number(repository, tmp_path, record, 3).version == 3
        assert [served.send(ROUTE, headers={"x-variant": f"v{n}"}).added for n in (1, 2, 3)] == [1, 2, 3]

    assert [outcome.answer for outcome in load.outcomes if not is_right(outcome.answer)] == []


def resnet(blocks=(3, 4, 6, 3), width=WIDTH, classes=1000) -> onnx.ModelProto:
    """Build a network of ResNet-50's shape: bottlenecks in four stages, with random weights of fixed seed."""
    rng = np.random.default_rng(50)
    nodes, weights = [], []

    def conv(x: str, channels: int, out: int, kernel: int, stride: int = 1, relu: bool = True) -> str:
        name = f"conv{len(weights)}"
        scale = np.sqrt(2 / (channels * kernel * kernel))
        array = (rng.standard_normal((out, channels, kernel, kernel)) * scale).astype(np.float32)
        weights.append(numpy_helper.from_array(array, f"{name}.weight"))
        pad = kernel // 2
        nodes.append(
            helper.make_node(
                "Conv",
                [x, f"{name}.weight"],
                [name],
                strides=[stride] * 2,
                pads=[pad] * 4,
                kernel_shape=[kernel] * 2,
            )
        )
        if not relu:
            return name
        nodes.append(helper.make_node("Relu", [name], [f"{name}.relu"]))
        return f"{name}.relu"

    x = conv("images", 3, width, 7, 2)
    nodes.append(
        helper.make_node("MaxPool", [x], ["pooled"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    )
    x, channels = "pooled", width
    for stage, count in enumerate(blocks):
        inner, out = width << stage, (width << stage) * 4
        for block in range(count):
            stride = 2 if stage and not block else 1
            y = conv(conv(conv(x, channels, inner, 1), inner, inner, 3, stride), inner, out, 1, relu=False)
            shortcut = conv(x, channels, out, 1, stride, relu=False) if not block else x
            nodes.append(helper.make_node("Add", [y, shortcut], [f"{y}.sum"]))
            nodes.append(helper.make_node("Relu", [f"{y}.sum"], [f"{y}.out"]))
            x, channels = f"{y}.out", out
    weights.append(
        numpy_helper.from_array((rng.standard_normal((channels, classes)) * 0.05).astype(np.float32), "fc")
    )
    nodes += [
        helper.make_node("GlobalAveragePool", [x], ["average"]),
        helper.make_node("Flatten", ["average"], ["features"]),
        helper.make_node("MatMul", ["features", "fc"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "resnet",
        [helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["N", 3, 224, 224])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["N", classes])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("profile", ["ensemble", "cpu"])
def test_resnet_is_served_with_one_command(tmp_path, profile):
    """A network like ResNet-50 returns the scores of plain ONNX Runtime, as ensemble and as fused model."""
    repository, file = tmp_path / "models", tmp_path / "resnet50.onnx"
    store_published(repository)
    onnx.save(resnet(), file)
    labels = tmp_path / "labels.txt"
    labels.write_text("".join(f"class {number}\n" for number in range(1000)))
    flags = [] if profile == "ensemble" else [f"--model-config-name={profile}"]

    with serve_routes(repository, tmp_path, *flags) as served:
        record = ServerRecord(**{**vars_of(record_of(served.server)), "profile": profile})
        done = add(repository, AddRequest(file, "resnet50", {"preset": "imagenet"}, labels), record)

        assert done.report.notes == ()
        image = np.array([[SAMPLES[0].read_bytes()]], np.object_)
        (scores,) = infer(served.server, "resnet50", {"image": image}, outputs=["scores"])["scores"]
        with Classifier(record.url("grpc"), "grpc", "resnet50") as classifier:
            best = classifier.classify(SAMPLES[0], top_k=1)

    tensor = pixels(repository / "resnet50_preprocess")
    expected = run(repository / "resnet50_network" / "1" / "model.onnx", {"images": tensor})["probabilities"][
        0
    ]
    # Another thread count adds up in another order.
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-6)
    assert best.labels[0].name == f"class {expected.argmax()}"
    assert (best.variant, best.version) == ("v1", "1")


def vars_of(record: ServerRecord) -> dict:
    """Return a record's fields."""
    return {name: getattr(record, name) for name in record.__slots__}


def pixels(folder: Path) -> np.ndarray:
    """Return the tensor that a preprocessing model makes from the first sample photo."""
    from nereid.config.model_config import ModelConfig
    from nereid.imaging.pipeline import Pipeline

    pipeline = Pipeline.from_config(ModelConfig.from_file(folder, 1))
    return pipeline.run([[SAMPLES[0].read_bytes()]]).tensor.copy()
