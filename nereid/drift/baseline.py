"""References: from a folder of images, which every variant classifies, or from recorded traffic."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nereid import files
from nereid.client.classifier import Classifier
from nereid.client.classifier_errors import RequestRefused
from nereid.client.detector_client import Detector
from nereid.client.model_client.model_client import ModelClient
from nereid.client.reader_client import Reader
from nereid.config.model_config import ModelConfig
from nereid.drift import series
from nereid.drift.comparison import Target, window_counts
from nereid.drift.recording import History
from nereid.drift.series import BOUNDS, INPUT_SIGNALS, OUTPUT_SIGNALS
from nereid.drift.targets import preprocessing_of
from nereid.errors import OperationFailed
from nereid.imaging.pipeline import Pipeline
from nereid.routing.reference_file import (
    CLASS,
    TOP_CLASSES,
    Histogram,
    Reference,
    VariantReference,
    format_reference,
    path_of,
)
from nereid.tasks import task_of
from nereid.tasks.task_outputs import Signals, TaskOutputs
from nereid.units import format_duration

MIN_IMAGES = 100
CONCURRENCY = 4
# Recorded traffic must cover this part of the requested time.
MIN_COVERED = 0.9
Log = Callable[[str], None]
# The clients by their tasks.
CLIENTS: Mapping[str, type[ModelClient[Any]]] = {
    client.kind.action: client for client in (Classifier, Reader, Detector)
}


@dataclass
class Measured:
    """Signals of one variant while its images are classified."""

    values: dict[str, list[float]] = field(
        default_factory=lambda: {signal: [] for signal in (*OUTPUT_SIGNALS, *INPUT_SIGNALS)}
    )
    best: list[int] = field(default_factory=list)
    images: int = 0

    def add_outputs(self, signals: Signals) -> None:
        """Add the signals of a response."""
        for name, values in signals.of_images.items():
            self.values[name] += values
        self.best += signals.best
        self.images += 1

    def add_inputs(self, signals: Mapping[str, float]) -> None:
        """Add the signals of an image."""
        for name, value in signals.items():
            self.values[name].append(value)

    def reference(self, target: Target, classes: Sequence[int]) -> VariantReference:
        """Return the reference of a variant; signals without a value are left out."""
        counts = Counter(self.best)
        named = [counts[index] for index in classes]
        return VariantReference(
            target.name,
            target.model,
            target.version,
            target.network_version,
            self.images,
            {name: histogram_of(values, BOUNDS[name]) for name, values in self.values.items() if values},
            (*named, len(self.best) - sum(named)) if self.best else (),
        )


def histogram_of(values: Sequence[float], bounds: tuple[float, ...]) -> Histogram:
    """Return the histogram of values; a value on a bound belongs to the bucket below it."""
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    return Histogram(bounds, tuple(counts))


def from_images(
    url: str, repository: Path, route: str, targets: Sequence[Target], images: Sequence[Path], log: Log
) -> Reference:
    """Send images to every variant of a running server, and return their reference.

    An image without a result is named and left out.

    Args:
        url: Triton's HTTP address.
        repository, route, targets: the route and its variants.
        images: image files.
        log: receives a line for each variant, and for each bad image.

    Raises:
        OperationFailed: fewer than `MIN_IMAGES` images are good, or the outputs cannot be measured.
        ClassifierError: the server fails.
    """
    measured: dict[str, Measured] = {}
    outputs = [each.name for each in ModelConfig.from_file(repository / route, 1).outputs]
    task = task_of(outputs)
    with (
        CLIENTS[task.name](url, "http", route, concurrency=CONCURRENCY) as client,
        ThreadPoolExecutor(CONCURRENCY) as pool,
    ):
        for target in targets:
            found = measured[target.name] = Measured()
            meter = _meter(repository, target, found)
            log(f"variant '{target.name}' gets {len(images)} files")
            outcomes = pool.map(lambda path, name=target.name: _signals(client, task, path, name), images)
            for path, outcome in zip(images, outcomes, strict=True):
                if isinstance(outcome, str):
                    log(f"{path}: {outcome}")
                    continue
                found.add_outputs(outcome)
                if meter:
                    meter.run([[path.read_bytes()]])
    for name, found in measured.items():
        if found.images < MIN_IMAGES:
            raise OperationFailed(
                f"variant '{name}': expected at least {MIN_IMAGES} good images, got {found.images} "
                f"of {len(images)}"
            )
    best = Counter(index for found in measured.values() for index in found.best)
    classes = tuple(index for index, _ in best.most_common(TOP_CLASSES))
    variants = tuple(measured[target.name].reference(target, classes) for target in targets)
    return Reference(datetime.now(UTC), str(images[0].parent), variants, classes)


def _meter(repository: Path, target: Target, found: Measured) -> Pipeline | None:
    """Return the preprocessing of a variant, which adds the signals of its images; None if it has none."""
    config = preprocessing_of(repository, target.model)
    return Pipeline.from_config(config, 1, 1, found.add_inputs) if config else None


def _signals(client: ModelClient[Any], task: TaskOutputs, path: Path, variant: str) -> Signals | str:
    """Return the signals of the response to an image, or why there are none."""
    try:
        outputs = client.arrays(path, variant=variant)
    except (OSError, RequestRefused) as error:
        return str(error)
    signals = task.signals(outputs)
    if signals is None:
        got = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in outputs.items())
        raise OperationFailed(
            f"variant '{variant}': expected finite numbers, of a classifier an FP32 score for each of at "
            f"least two classes, got {got}"
        )
    return signals


def from_traffic(
    history: History,
    route: str,
    targets: Sequence[Target],
    seconds: float,
    now: float,
    old: Reference | None,
    log: Log,
) -> Reference:
    """Return a reference from what the drift monitor recorded in the last `seconds`.

    The classes are those of the old reference, because the route counts no others.

    Raises:
        OperationFailed: the monitor recorded too little.
    """
    _, covered_s = history.window(now, seconds)
    window = history.window_since(old.created.timestamp() if old else now, now, seconds)
    if covered_s < MIN_COVERED * seconds:
        raise OperationFailed(
            f"expected {format_duration(seconds)} of recorded traffic, got {format_duration(covered_s)}; "
            "fix: wait, or nereid drift baseline --images DIR"
        )
    classes = old.classes if old else ()
    variants = []
    for target in targets:
        signals = {}
        for name, bounds in BOUNDS.items():
            if counts := window_counts(target, route, name, window):
                signals[name] = Histogram(bounds, tuple(series.histogram(counts, name)))
        images = max((sum(signals[name].counts) for name in OUTPUT_SIGNALS if name in signals), default=0)
        if images < MIN_IMAGES:
            log(f"variant '{target.name}' is left out: {images} images in {format_duration(seconds)}")
            continue
        of_class = window_counts(target, route, CLASS, window)
        best = tuple(series.class_counts(of_class, classes)) if classes and of_class else ()
        variants.append(
            VariantReference(
                target.name, target.model, target.version, target.network_version, images, signals, best
            )
        )
    if not variants:
        raise OperationFailed(f"expected at least {MIN_IMAGES} images of a variant, got fewer for each")
    return Reference(datetime.now(UTC), f"traffic of {format_duration(seconds)}", tuple(variants), classes)


def store(repository: Path, route: str, reference: Reference) -> Path:
    """Write the reference of a route atomically, and return its path.

    Raises:
        OSError: it cannot be written.
    """
    path = path_of(repository, route)
    files.replace(path, format_reference(reference))
    return path
