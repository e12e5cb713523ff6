"""The CPU time of the quality signals for each request, without the server around them.

python -m loadtest.signal_cost [--rounds 7] [--record signal_cost]
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from loadtest import record
from nereid.assets import CHELSEA
from nereid.contract import SCORES
from nereid.imaging.decode import Limits, open_image
from nereid.imaging.image_signals import ImageMeter
from nereid.imaging.preprocess_settings import PRESETS
from nereid.imaging.preprocessor import CpuPreprocessor
from nereid.imaging.transform import Transform
from nereid.routing.quality import RouteQuality
from nereid.tasks.classification_outputs import ClassificationOutputs, softmax

CALLS = 3000
# Per request, at most.
TARGET_US = 50.0
HEADINGS = ("part", "median µs", "fastest", "slowest")
markdown_of = partial(record.markdown, HEADINGS)


class Sink:
    """Takes what a route adds."""

    def add(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        """Do nothing."""

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Do nothing."""


class Response:
    """A response with the scores of one image."""

    def __init__(self, scores: np.ndarray) -> None:
        self._scores = scores

    def arrays(self, response: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the scores by the names of outputs."""
        return dict.fromkeys(names, self._scores)


def _transform(layout: str) -> Transform:
    preset = PRESETS["imagenet"]
    mean, std = (tuple(map(float, preset[name].split(","))) for name in ("mean", "std"))
    return Transform(224, 224, layout=layout, resize_shorter_px=256, mean=mean, std=std)


def parts() -> Mapping[str, Callable[[], object]]:
    """Return what is measured, by name."""
    found: dict[str, Callable[[], object]] = {}
    encoded = CHELSEA.read_bytes()
    for layout in ("NCHW", "NHWC"):
        transform = _transform(layout)
        preprocessor = CpuPreprocessor(transform, Limits(), 1)
        preprocessor.prepare([encoded])
        meter = ImageMeter(transform, lambda signals: None)
        image, row = open_image(encoded, Limits()), preprocessor.tensor[0]
        found[f"all signals of an image, {layout}"] = partial(meter, encoded, image, row)
    logits = np.random.default_rng(1).normal(0, 3, (1, 1000)).astype(np.float32)
    scores, task = softmax(logits), ClassificationOutputs()
    found["confidence, entropy and class of 1,000 probabilities"] = partial(task.signals, {SCORES: scores})
    found["confidence, entropy and class of 1,000 logits"] = partial(task.signals, {SCORES: logits})
    quality = RouteQuality(Sink(), task)
    quality.use(frozenset(range(20)))
    labels = {"variant": "v1", "version": "1"}
    request: Any = Response(scores)
    found["all signals of a response"] = partial(quality.observe, request, None, labels)
    return found


def measure(part: Callable[[], object]) -> float:
    """Return the CPU time of one call, in microseconds."""
    began_s = time.process_time()
    for _ in range(CALLS):
        part()
    return (time.process_time() - began_s) / CALLS * 1e6


def markdown(rows: Sequence[record.Row]) -> str:
    """Render the rows as the table of docs/drift.md."""
    return markdown_of(
        (row["part"], f"{row['us']['median']:.1f}", f"{row['us']['min']:.1f}", f"{row['us']['max']:.1f}")
        for row in rows
    )


def main() -> int:
    """Measure, print and record; exit status 1 if an image and its response cost too much together."""
    args = record.parsed(record.parser(__doc__, rounds=7))
    found: dict[str, list[float]] = {name: [] for name in parts()}
    for number in range(args.rounds):
        measured = parts()
        for name in record.turns(measured, number):
            found[name].append(measure(measured[name]))
    rows = [{"part": name, "us": record.spread(values, 1)} for name, values in found.items()]
    print(markdown(rows))
    total = statistics.median(found["all signals of an image, NCHW"])
    total += statistics.median(found["all signals of a response"])
    missed = [f"{total:.0f} µs for each request, limit {TARGET_US:.0f}"] if total > TARGET_US else []
    return record.finish(args.record, {"rows": rows}, missed)


if __name__ == "__main__":
    record.end(main)
