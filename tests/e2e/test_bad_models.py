"""Networks that may not be served, published at the real server: refused before it has seen any of them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from nereid.errors import OperationFailed
from nereid.publish.publisher import Gates, publish
from tests.networks import constant, network, value
from tests.publishing import NET, ROUTE, contents, record_of, store_published
from tests.routes import CLASSES, adding, serve_routes

pytestmark = pytest.mark.slow
GATES = Gates(max_slowdown=3.0)
BATCH = ["batch", CLASSES]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of `net` in version 1, behind route `r`."""
    repository = tmp_path_factory.mktemp("bad") / "models"
    store_published(repository)
    with serve_routes(repository, tmp_path_factory.mktemp("run")) as running:
        yield running


def sums(more=(), x="x", shape=BATCH, datatype="FP32", y="scores", weights=(), number=1.0) -> onnx.ModelProto:
    """Build the sum that version 1 of `net` is, or one that differs from it."""
    nodes = [helper.make_node("Add", [x, "number"], [y if not more else "sum"]), *more]
    dtype = {"FP32": np.float32, "FP64": np.float64}[datatype]
    return network(
        nodes,
        [value(x, datatype, shape)],
        [value(y, datatype, shape)],
        [constant("number", dtype(number)), *weights],
    )


def stamped(opset: int, ir_version: int) -> onnx.ModelProto:
    """Build the right network under other stamps."""
    model = sums()
    model.opset_import[0].version, model.ir_version = opset, ir_version
    return model


def outside(location: str) -> Callable[[Path], None]:
    """Write a network whose number is in another file, at a location that the network names."""

    def write(folder: Path) -> None:
        onnx.save(
            sums(number=[1.0] * CLASSES),
            folder / "model.onnx",
            save_as_external_data=True,
            location="data",
            size_threshold=0,
        )
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        for entry in model.graph.initializer[0].external_data:
            entry.value = location if entry.key == "location" else entry.value
        onnx.save(model, folder / "model.onnx")
        shutil.copy(folder / "data", folder.parent / "data")

    return write


def sized(cut: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Write the right network, cut."""
    return lambda folder: (folder / "model.onnx").write_bytes(cut(sums().SerializeToString())) and None


def with_labels(text: str) -> Callable[[Path], None]:
    """Write the right network with labels of its own."""

    def write(folder: Path) -> None:
        onnx.save(sums(), folder / "model.onnx")
        (folder / "labels.txt").write_text(text)

    return write


def slow() -> onnx.ModelProto:
    """Build the right outputs after many products that change nothing."""
    size = 2000
    more = [
        helper.make_node("MatMul", ["sum", "spread"], ["wide0"]),
        *(helper.make_node("MatMul", [f"wide{i}", "square"], [f"wide{i + 1}"]) for i in range(8)),
        helper.make_node("MatMul", ["wide8", "back"], ["nothing"]),
        helper.make_node("Add", ["sum", "nothing"], ["scores"]),
    ]
    arrays = {
        "spread": np.zeros((CLASSES, size), np.float32),
        "square": np.eye(size, dtype=np.float32),
        "back": np.ones((size, CLASSES), np.float32),
    }
    return sums(more, weights=[constant(name, array) for name, array in arrays.items()])


BAD = {
    "shape": (
        sums(shape=["batch", 4]),
        r"input 'x': expected FP32 \[-1,3\], got FP32 \[-1,4\]; output 'scores': expected",
    ),
    "datatype": (sums(datatype="FP64"), r"input 'x': expected FP32 \[-1,3\], got FP64 \[-1,3\]"),
    "input-name": (
        sums(x="pixels"),
        r"input 'x': expected FP32 \[-1,3\], got none; unexpected input 'pixels'",
    ),
    "output-name": (sums(y="y"), r"output 'scores': expected FP32 \[-1,3\], got none; unexpected output 'y'"),
    "fixed-batch": (sums(shape=[1, CLASSES]), r"input 'x': expected FP32 \[-1,3\], got FP32 \[1,3\]"),
    "opset": (
        stamped(99, 8),
        r"expected opset at most \d+ for the embedded server .* for the container .*, got 99",
    ),
    "ir-version": (stamped(17, 99), r"expected IR version at most \d+ for the embedded server .*, got 99"),
    "nan": (sums(number=np.nan), r"weight 'number': expected numbers, got NaN in 1 of 1 values"),
    "empty": (sized(lambda content: b""), r"is empty \(0 bytes\)"),
    "truncated": (
        sized(lambda content: content[:-20]),
        r"expected an ONNX network, got a truncated or other file \(\d+ bytes\)",
    ),
    "text": (
        sized(lambda content: b"not a network\n"),
        r"expected an ONNX network, got a text file \(14 bytes\)",
    ),
    "data-above": (
        outside("../data"),
        r"values of tensor 'number' are in '../data', outside the network's folder",
    ),
    "data-absolute": (outside("/etc/passwd"), r"'number' are in '/etc/passwd', outside the network's folder"),
    "data-missing": (outside("nowhere"), r"values of tensor 'number' are in 'nowhere', which is missing"),
    "labels": (with_labels("one\n"), r"expected 3 labels, got 1"),
    "answers": (adding(2), r"output 'scores' .*; fix: publish it with --accept-change"),
    "not-finite": (adding(np.inf), r"output 'scores' on .*: expected finite numbers"),
    "slow": (slow(), r"the network is too slow: .* version's [\d.]+ ms for one row, got [\d.]+ ms"),
}


@pytest.mark.parametrize(("bad", "reason"), BAD.values(), ids=[*BAD])
def test_bad_network_is_refused_and_never_reaches_the_server(served, tmp_path, bad, reason):
    """The message has the reason; the repository and the server's log are unchanged."""
    folder = tmp_path / "new"
    folder.mkdir()
    if isinstance(bad, onnx.ModelProto):
        onnx.save(bad, folder / "model.onnx")
    else:
        bad(folder)
    before, lines = contents(served.repository), len(served.log)

    with pytest.raises(OperationFailed, match=reason) as caught:
        publish(served.repository, NET, folder, record_of(served.server), GATES)

    assert "\n" not in str(caught.value)
    assert contents(served.repository) == before
    assert served.log[lines:] == []
    assert served.send(ROUTE).added == 1
