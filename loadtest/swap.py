"""Versions that are published under load: how they are written, and the expected responses of each.

Each version has its own last bias, so its scores differ from all others. The library computes the expected
scores in this process.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from nereid import assets
from nereid.assets import COFFEE
from nereid.client.prediction import Prediction
from nereid.config.model_config import ModelConfig
from nereid.imaging.pipeline import Pipeline
from nereid.inference.session import Session
from nereid.publish.publisher import Gates
from nereid.serving_errors import InferenceFailed

NETWORK, ROUTE, BIAS = "efficientnet_lite0", "classify", "network._fc.bias"
HALF = 0.5
# The candidates equal the current version in speed, but the load disturbs the comparison.
GATES = Gates(is_change_accepted=True, max_slowdown=100)
ESPRESSO, STEP = 967, 0.03
# Scores from batches of different sizes differ by less than this.
TOLERANCE = 1e-4
# Multiplications with which a request takes about 30 % longer.
EXTRA = 20


class References:
    """The expected best class of each photo and its probability, by version.

    Args:
        repository: its first two versions are computed immediately.
        photos: the image files that callers send; one of an espresso if there are none.
    """

    def __init__(self, repository: Path, photos: Iterable[bytes] = ()) -> None:
        self._repository = repository
        pipeline = Pipeline.from_config(ModelConfig.from_file(repository / "imagenet_preprocess", 1))
        different = dict.fromkeys(photos) or [COFFEE.read_bytes()]
        self._pixels = [pipeline.run([[photo]]).tensor.copy() for photo in different]
        self._known: dict[str, list[tuple[int, float]]] = {}
        for version in (1, 2):
            self.add(version, repository / NETWORK / str(version))

    def add(self, version: int, folder: Path) -> None:
        """Compute the responses of the network in a version folder, except those that fail."""
        config = ModelConfig.from_file(self._repository / NETWORK, version)
        document = {**config.document, "default_model_filename": str(folder.resolve() / "model.onnx")}
        session = Session.from_config(ModelConfig.from_document(document, config.folder, 1))
        self._known[str(version)] = []
        for pixels in self._pixels:
            with contextlib.suppress(InferenceFailed):
                (scores,) = session.run({"input": pixels}, ["scores"])
                best = int(scores[0].argmax())
                self._known[str(version)].append((best, float(scores[0, best])))

    def check(self, prediction: Prediction) -> str:
        """Return the fault of a response, empty for a correct one."""
        best, expected = prediction.labels[0], self._known[prediction.version]
        if any(best.index == index and abs(best.score - score) < TOLERANCE for index, score in expected):
            return ""
        return f"version {prediction.version}: expected one of {expected}, got {best}"


def write_candidate(folder: Path, number: int) -> Path:
    """Write the FP32 network with a different bias for espresso."""
    model = onnx.load(assets.REPOSITORY / NETWORK / "1" / "model.onnx")
    (bias,) = (each for each in model.graph.initializer if each.name == BIAS)
    values = numpy_helper.to_array(bias).copy()
    values[ESPRESSO] -= STEP * number
    bias.CopyFrom(numpy_helper.from_array(values, BIAS))
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def slower(folder: Path, extra: int = EXTRA) -> Path:
    """Write the network with more work, a number of multiplications of matrices."""
    path = write_candidate(folder, 0)
    model = onnx.load(path)
    graph, side = model.graph, 256
    graph.initializer.append(numpy_helper.from_array(np.full((side, side), 1 / side, np.float32), "work"))
    nodes = [
        helper.make_node("ReduceMean", [graph.input[0].name], ["mean"], axes=[0, 1, 2, 3], keepdims=0),
        helper.make_node("Mul", ["work", "mean"], ["work0"]),
    ]
    for number in range(extra):
        nodes.append(helper.make_node("MatMul", [f"work{number}", "work"], [f"work{number + 1}"]))
    nodes += [
        helper.make_node("ReduceMean", [f"work{extra}"], ["rest"], axes=[0, 1], keepdims=0),
        helper.make_node("Mul", ["rest", "zero"], ["nothing"]),
    ]
    graph.initializer.append(numpy_helper.from_array(np.array(0, np.float32), "zero"))
    name = graph.output[0].name
    for node in graph.node:
        node.output[:] = ["scores without" if each == name else each for each in node.output]
    graph.node.extend(nodes)
    graph.node.append(helper.make_node("Add", ["scores without", "nothing"], [name]))
    onnx.save(model, path)
    return path
