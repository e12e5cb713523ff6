"""Networks that must not be served, published at the real server, which never opens any of them.

`tests/unit/test_examine.py` has every reason for a rejection; here is one network for each kind of check.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from nereid.errors import OperationFailed
from nereid.publish.publisher import Gates, publish
from tests.publishing import NET, ROUTE, contents, record_of, store_published
from tests.routes import adding, serve_routes

pytestmark = pytest.mark.nightly(minutes=1)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    repository = tmp_path_factory.mktemp("bad") / "models"
    store_published(repository)
    with serve_routes(repository, tmp_path_factory.mktemp("run")) as running:
        yield running


def truncated(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(adding(1).SerializeToString()[:-20])


def outside(folder: Path) -> None:
    path = folder / "model.onnx"
    onnx.save(adding(1), path, save_as_external_data=True, location="data", size_threshold=0)
    (folder / "data").rename(folder.parent / "data")
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        entry.value = "../data" if entry.key == "location" else entry.value
    onnx.save(model, path)


def with_labels(folder: Path) -> None:
    onnx.save(adding(1), folder / "model.onnx")
    (folder / "labels.txt").write_text("one\n")


def holding(number: float) -> Callable[[Path], None]:
    return lambda folder: onnx.save(adding(number), folder / "model.onnx")


BAD = {
    "file": (truncated, r"expected an ONNX network, got a truncated or other file \(\d+ bytes\)"),
    "external-data": (outside, r"values of tensor .* are in '../data', outside the network's folder"),
    "weights": (holding(np.nan), r"weight .*: expected numbers, got NaN in 1 of 1 values"),
    "labels": (with_labels, r"expected 3 labels, got 1"),
    "answers": (holding(2), r"output 'scores' .*; fix: publish it with --accept-change"),
    "not-finite": (holding(np.inf), r"output 'scores' on .*: expected finite numbers"),
}


@pytest.mark.parametrize(("write", "reason"), BAD.values(), ids=[*BAD])
def test_bad_network_is_rejected_and_never_reaches_the_server(served, tmp_path, write, reason):
    folder = tmp_path / "new"
    folder.mkdir()
    write(folder)
    before, lines = contents(served.repository), len(served.log)

    with pytest.raises(OperationFailed, match=reason) as caught:
        publish(served.repository, NET, folder, record_of(served.server), Gates(max_slowdown=3.0))

    assert "\n" not in str(caught.value)
    assert contents(served.repository) == before
    assert served.log[lines:] == []
    assert served.send(ROUTE).added == 1
