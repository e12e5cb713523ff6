"""Users' classifiers on the real server: every form of network is right, or refused with a reason."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from PIL import Image

from nereid import Classifier
from nereid.publish.add import add
from nereid.publish.remove import remove
from nereid.publish.staged_addition import AddRequest
from tests.pairwise import Row, pairwise
from tests.pictures import noise, save
from tests.publishing import record_of
from tests.routes import serve_routes
from tests.user_networks import CLASSES, UserNetwork

pytestmark = pytest.mark.nightly(minutes=4)
NAMES = [f"name {number}" for number in range(CLASSES)]
SIDE = 16
# Parameters, and the same as mean and std per channel in the order of the network.
PREPROCESSING = {
    "scale": ({"scale": str(1 / 255)}, [0.0] * 3, [255.0] * 3),
    "one-number": ({"mean": "127.5", "std": "127.5"}, [127.5] * 3, [127.5] * 3),
    "per-channel": ({"mean": "120, 110, 100", "std": "60, 50, 40"}, [120, 110, 100], [60, 50, 40]),
    "bgr": ({"mean": "100, 110, 120", "std": "255", "color_order": "BGR"}, [100, 110, 120], [255] * 3),
}


@dataclass(frozen=True)
class Cell:
    """One network of a user: its form, its preprocessing, and the origin of its labels."""

    form: UserNetwork
    preprocessing: str
    labels: str

    def __str__(self) -> str:
        form = self.form
        return (
            f"{form.layout}-{form.channels}-{form.datatype}-{form.batch or 'N'}-{form.side_px or 'HW'}-"
            f"{form.activation}-{form.tail}-{form.opset}-{self.preprocessing}-{self.labels}"
        )


OPTIONS = {
    "layout": ("NCHW", "NHWC"),
    "channels": (3, 1),
    "datatype": ("FP32", "FP16", "UINT8"),
    "batch": (None, 1),
    "activation": ("none", "softmax", "sigmoid"),
    "tail": (0, 2),
    "side_px": (SIDE, None),
    # Newer stamps of exporters. In opset 28 the Cast of UINT8 networks is another operator.
    "opset": (17, 28),
    "preprocessing": (*PREPROCESSING, "none"),
    "labels": ("file", "metadata", "none"),
}


def is_possible(row: Row) -> bool:
    is_byte = row["datatype"] == "UINT8"
    return (
        is_byte == (row["preprocessing"] == "none")
        and not (is_byte and row["opset"] == 28)
        and not (row["channels"] == 1 and row["preprocessing"] == "bgr")
    )


def cell(row: Row) -> Cell:
    form = {name: row[name] for name in OPTIONS if name not in ("preprocessing", "labels")}
    network = UserNetwork(**form, ir_version=14 if row["opset"] == 28 else 8)
    return Cell(network, row["preprocessing"], row["labels"])


CELLS = [cell(row) for row in pairwise(OPTIONS, is_possible)]


def photo() -> bytes:
    """Return a picture of the network's size, so that no resize takes part."""
    return save(Image.fromarray(noise(SIDE, SIDE)))


def network_input(cell: Cell, encoded: bytes) -> np.ndarray:
    """Return what the network must see, float64[1, ...]."""
    pixels = np.asarray(Image.open(io.BytesIO(encoded)), np.float64)
    if cell.preprocessing != "none":
        parameters, mean, std = PREPROCESSING[cell.preprocessing]
        if parameters.get("color_order") == "BGR":
            pixels = pixels[:, :, ::-1]
        pixels = (pixels - mean) / std
    return (pixels if cell.form.is_last else pixels.transpose(2, 0, 1))[None]


def write(cell: Cell, folder: Path) -> Path:
    model = cell.form.build()
    if cell.labels == "metadata":
        helper.set_model_props(model, {"names": repr(dict(enumerate(NAMES)))})
    folder.mkdir()
    onnx.save(model, folder / "network.onnx")
    return folder / "network.onnx"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    repository = tmp_path_factory.mktemp("users") / "models"
    folder = tmp_path_factory.mktemp("first")
    first = write(Cell(UserNetwork(), "scale", "none"), folder / "first")
    add(repository, AddRequest(first, "first", PREPROCESSING["scale"][0], profiles=("cpu",)), None)
    with serve_routes(repository, tmp_path_factory.mktemp("run"), "--model-config-name=cpu") as running:
        yield repository, running


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_network_of_a_user_is_right(site, tmp_path, cell):
    repository, running = site
    name = f"m{CELLS.index(cell)}"
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(NAMES) + "\n")
    parameters = {"resize": "exact", **PREPROCESSING.get(cell.preprocessing, ({},))[0]}
    request = AddRequest(
        write(cell, tmp_path / "source"),
        name,
        parameters,
        labels if cell.labels == "file" else None,
        size=(0, 0) if cell.form.side_px else (SIDE, SIDE),
        profiles=("cpu",),
    )

    record = record_of(running.server)
    add(repository, request, record)

    encoded = photo()
    kind = "softmax" if cell.form.activation == "none" else cell.form.activation
    expected = cell.form.probabilities(network_input(cell, encoded), kind)[0]
    with Classifier(record.url("grpc"), model=name) as classifier:
        scores, found = classifier.scores(encoded), classifier.classify(encoded)
    tolerance = 0.02 if cell.form.datatype == "FP16" else 2e-3
    np.testing.assert_allclose(scores, expected, atol=tolerance)
    best = int(np.argmax(expected))
    assert found.labels[0].name == ("" if cell.labels == "none" else NAMES[best])
    # All cells together would need more threads than the machine allows.
    assert remove(repository, name, record)[-1] == name
