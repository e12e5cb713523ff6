"""The networks of the route: their expected answers, and the changes that operators make under load."""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from loadtest.servers import Supervised
from nereid.base import assets
from nereid.base.config.model_config import ModelConfig
from nereid.models.publish.examination import ExaminationLimits
from nereid.models.publish.publisher import publish, retire, rollback
from nereid.models.routes.change import change_with_retry, propose_weights
from nereid.models.routes.location import find_route
from nereid.repository.repository_index import versions_on_disk
from nereid.server.model_control import ModelControl
from nereid.server.supervision import supervisor
from nereid.tasks.classify.result import Prediction
from nereid.vision.imaging.pipeline import Pipeline
from nereid.vision.inference.session import Session

NETWORK, ROUTE, RELOADED = "efficientnet_lite0", "classify", "classify_v1"
BIAS, ESPRESSO, STEP = "network._fc.bias", 967, 0.03
# The candidates equal the current version in speed, but the load disturbs the comparison.
GATES, HALF = ExaminationLimits(is_change_accepted=True, max_slowdown=100), 0.5
# Scores from batches of different sizes differ by less than this.
TOLERANCE = 1e-4
# The number of networks that are published in turn, and the time that a change gets traffic.
CANDIDATES, PAUSE_S = 3, 1.0


class Photo:
    """A photo, with its expected best class and probability by version, computed in this process."""

    def __init__(self, file: bytes, repository: Path) -> None:
        pipeline = Pipeline.from_config(ModelConfig.from_file(repository / "imagenet_preprocess", 1))
        self.file, self._pixels = file, pipeline.run([[file]]).tensor.copy()
        self.known = {
            str(number): self.answer(repository, repository / NETWORK / str(number) / "model.onnx")
            for number in (1, 2)
        }

    def answer(self, repository: Path, path: Path) -> tuple[int, float]:
        """Return the best class and its probability of a network's file."""
        config = ModelConfig.from_file(repository / NETWORK, 1)
        document = {**config.document, "default_model_filename": str(path.resolve())}
        session = Session.from_config(ModelConfig.from_document(document, config.folder, 1))
        (scores,) = session.run({"input": self._pixels}, ["scores"])
        return int(scores[0].argmax()), float(scores[0].max())

    def fault(self, prediction: Prediction) -> str:
        """Return the fault of an answer, empty for a right one."""
        best, expected = prediction.labels[0], self.known.get(prediction.version)
        if expected and best.index == expected[0] and abs(best.score - expected[1]) < TOLERANCE:
            return ""
        return f"version {prediction.version}: expected {expected}, got {best}"


def write_candidate(path: Path, number: int) -> Path:
    """Write the FP32 network with a different bias for espresso, so its scores are its own."""
    model = onnx.load(assets.REPOSITORY / NETWORK / "1" / "model.onnx")
    (bias,) = (tensor for tensor in model.graph.initializer if tensor.name == BIAS)
    values = np.array(numpy_helper.to_array(bias))
    values[ESPRESSO] -= STEP * number
    bias.CopyFrom(numpy_helper.from_array(values, BIAS))
    path.parent.mkdir(parents=True)
    onnx.save(model, path)
    return path


class Changes:
    """Changes a running server as operators do; `rounds` counts the rounds.

    The server has a copy of the default repository. The folder takes the published networks, of which the
    photos learn the expected answers.
    """

    def __init__(self, running: Supervised, folder: Path, photos: Sequence[Photo]) -> None:
        self.rounds = 0
        self._running, self._photos, repository = running, photos, running.repository
        paths = [
            write_candidate(folder / str(number) / "model.onnx", number + 1) for number in range(CANDIDATES)
        ]
        answers = [[photo.answer(repository, path) for photo in photos] for path in paths]
        self._candidates = itertools.cycle(zip(paths, answers, strict=True))
        # Version numbers are never reused.
        self._next = max(versions_on_disk(repository / NETWORK)) + 1

    def cycle(self) -> None:
        """Publish, roll back and retire a version, move the weights and back, and load a model again."""
        server_info, repository = self._running.server_info, self._running.repository
        source, answers = next(self._candidates)
        for photo, answer in zip(self._photos, answers, strict=True):
            photo.known[str(self._next)] = answer
        done = publish(repository, ROUTE, source, server_info, GATES, HALF)
        self._next = done.version + 1
        time.sleep(PAUSE_S)
        rollback(repository, ROUTE, server_info)
        retire(repository, ROUTE, done.version, server_info)
        self._reweight({"v1": 90, "v2": 10})
        time.sleep(PAUSE_S)
        self._reweight({"v1": 50, "v2": 50})
        supervisor.touch(repository / RELOADED / "1")
        ModelControl(server_info).load(RELOADED)
        self.rounds += 1

    def _reweight(self, weights: dict[str, float]) -> None:
        target = find_route(self._running.repository, ROUTE)
        change_with_retry(target, propose_weights(weights), self._running.server_info)
