"""References: from a folder of images, which every variant classifies, or from recorded traffic."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

from nereid.backends.routing.reference_file import (
    CLASS,
    TOP_CLASSES,
    Histogram,
    Reference,
    VariantReference,
)
from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import OperationFailed
from nereid.base.task_outputs import QualitySignals, TaskOutputs
from nereid.base.task_registry import DEFAULT_TASK, make_task_outputs, task_of
from nereid.base.units import format_duration
from nereid.client.client_errors import RequestRefused
from nereid.client.model_client import ModelClient
from nereid.insight.drift import recording
from nereid.insight.drift.comparison import MonitoredVariant
from nereid.insight.drift.recording import BOUNDS, History, SeriesCounts, bucket_name
from nereid.models.routes.location import preprocessing_of
from nereid.vision.imaging.pipeline import Pipeline

MIN_IMAGES = 100
CONCURRENCY = 4
# Recorded traffic must cover this fraction of the requested time.
MIN_COVERED = 0.9
Log = Callable[[str], None]


@dataclass
class VariantSignals:
    """Signals of one variant while its images are classified, as if they were an increase of samples."""

    target: MonitoredVariant
    window: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    images: int = 0

    def add_outputs(self, signals: QualitySignals) -> None:
        """Add the signals of a response."""
        for name, values in signals.of_images.items():
            for value in values:
                self._add(name, value)
        for index in signals.best:
            self.window[self.target.series(CLASS)][str(index)] += 1
        self.images += 1

    def add_inputs(self, signals: Mapping[str, float]) -> None:
        """Add the signals of an image."""
        for name, value in signals.items():
            self._add(name, value)

    def _add(self, signal: str, value: float) -> None:
        """Count a value in its bucket; a value on a bound belongs to the bucket below it."""
        bound = (*BOUNDS[signal], inf)[bisect_left(BOUNDS[signal], value)]
        self.window[self.target.series(signal)][bucket_name(bound)] += 1


def reference_of(
    target: MonitoredVariant, window: SeriesCounts, images: int, classes: Sequence[int]
) -> VariantReference:
    """Return the reference of a variant from a window; signals without a value are left out."""
    signals = {
        name: Histogram(bounds, tuple(recording.histogram(counts, name)))
        for name, bounds in BOUNDS.items()
        if (counts := window.get(target.series(name)))
    }
    class_counts = window.get(target.series(CLASS), {})
    best = tuple(recording.class_counts(class_counts, classes)) if classes and class_counts else ()
    return VariantReference(
        target.name, target.model, target.version, target.network_version, images, signals, best
    )


def from_images(
    url: str,
    repository: Path,
    route: str,
    targets: Sequence[MonitoredVariant],
    images: Sequence[Path],
    log: Log,
) -> Reference:
    """Send images to every variant of a running server, and return their reference.

    An image without a result is reported and left out.

    Raises:
        OperationFailed: fewer than `MIN_IMAGES` images are good, or the outputs cannot be measured.
        NereidError: the server fails.
    """
    measured = [VariantSignals(target) for target in targets]
    outputs = [tensor.name for tensor in ModelConfig.from_file(repository / route, 1).outputs]
    task = make_task_outputs(outputs)
    client_class = (task_of(outputs) or DEFAULT_TASK).entry_point("client")
    with (
        client_class(url, "http", route, concurrency=CONCURRENCY) as client,
        ThreadPoolExecutor(CONCURRENCY) as pool,
    ):
        for recorded in measured:
            target = recorded.target
            config = preprocessing_of(repository, target.model)
            meter = Pipeline.from_config(config, 1, 1, recorded.add_inputs) if config else None
            log(f"variant '{target.name}' gets {len(images)} files")
            outcomes = pool.map(lambda path, name=target.name: _signals(client, task, path, name), images)
            for path, outcome in zip(images, outcomes, strict=True):
                if isinstance(outcome, str):
                    log(f"{path}: {outcome}")
                    continue
                recorded.add_outputs(outcome)
                if meter:
                    meter.run([[path.read_bytes()]])
    best = Counter[str]()
    for recorded in measured:
        if recorded.images < MIN_IMAGES:
            raise OperationFailed(
                f"variant '{recorded.target.name}': expected at least {MIN_IMAGES} good images, "
                f"got {recorded.images} of {len(images)}"
            )
        best.update(recorded.window.get(recorded.target.series(CLASS), {}))
    classes = tuple(int(index) for index, _ in best.most_common(TOP_CLASSES))
    variants = tuple(
        reference_of(variant.target, variant.window, variant.images, classes) for variant in measured
    )
    return Reference(datetime.now(UTC), str(images[0].parent), variants, classes)


def _signals(client: ModelClient[Any], task: TaskOutputs, path: Path, variant: str) -> QualitySignals | str:
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
    targets: Sequence[MonitoredVariant],
    seconds: float,
    now: float,
    old: Reference | None,
    log: Log,
) -> Reference:
    """Return a reference from what the drift monitor recorded in the last `seconds`.

    It keeps the classes of the old reference, because the route counts no others.

    Raises:
        OperationFailed: the monitor recorded too little.
    """
    window, covered_s = history.window(now, seconds, old.created.timestamp() if old else now)
    if covered_s < MIN_COVERED * seconds:
        raise OperationFailed(
            f"expected {format_duration(seconds)} of recorded traffic, got {format_duration(covered_s)}; "
            "fix: wait, or nereid drift baseline --images DIR"
        )
    classes = old.classes if old else ()
    variants = []
    for target in targets:
        images = target.requests(window)
        if images < MIN_IMAGES:
            log(f"variant '{target.name}' is left out: {images} images in {format_duration(seconds)}")
        else:
            variants.append(reference_of(target, window, images, classes))
    if not variants:
        raise OperationFailed(f"expected at least {MIN_IMAGES} images of a variant, got fewer for each")
    return Reference(datetime.now(UTC), f"traffic of {format_duration(seconds)}", tuple(variants), classes)
