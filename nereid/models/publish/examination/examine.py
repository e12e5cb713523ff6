"""Examination of a network in a separate process, `nereid.models.publish.examination.examiner`.

A broken network can crash its process or use all memory. In a separate process it affects neither the
server nor the command.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from nereid.base.errors import OperationFailed
from nereid.models.publish import child
from nereid.models.publish.intake.adaptation import Activation

EXAMINER = "nereid.models.publish.examination.examiner"


@dataclass(frozen=True, slots=True)
class Gates:
    """Limits for a new version, compared with the current one.

    Args:
        images: the images that both versions classify; () for those of the task.
        tolerance: maximum difference of outputs, relative to the current version's largest |output|.
        is_change_accepted: whether a larger difference is only noted.
        max_slowdown: maximum ratio of the median latencies.
        max_memory_ratio: maximum ratio of the memory sizes.
        against: version to compare with; 0 for the version of a route's default variant.
    """

    images: tuple[Path, ...] = ()
    tolerance: float = 0.05
    is_change_accepted: bool = False
    max_slowdown: float = 1.5
    max_memory_ratio: float = 1.5
    against: int = 0


# An endless loop in a network must not hold the publisher for long.
TIMEOUT_S, BYTES_PER_S = 60.0, 10 * 2**20


@dataclass(frozen=True, slots=True)
class ExaminationRequest:
    """The network to examine, and the limits for it.

    Args:
        model: its name, for messages.
        candidate: a version folder, with or without a number as its name.
        document: the model's config, with protobuf field names.
        current: the version folder to compare with; None for a first version.
        labels: label file whose lines are counted against the classes of the output.
        gates: the limits, and the encoded golden images.
        preprocess: folder of the model that converts images to inputs; None for random inputs.
        preprocess_version: the version of that model.
        is_survey: whether the network is only run once, to see what it returns.
        after: folder of the model that turns the outputs into those of the pinned model; None for none.
        after_version: the version of that model.
        reader: folder of the model that reads text with the network; None for other networks.
    """

    model: str
    candidate: Path
    document: Mapping[str, Any]
    current: Path | None = None
    labels: Path | None = None
    gates: Gates = Gates()
    preprocess: Path | None = None
    preprocess_version: int = 0
    is_survey: bool = False
    after: Path | None = None
    after_version: int = 0
    reader: Path | None = None

    def to_json(self) -> bytes:
        """Return the request as one line of JSON."""
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def from_json(cls, text: str) -> "ExaminationRequest":
        """Parse the result of `to_json`."""
        return msgspec.json.decode(text, type=cls, dec_hook=lambda path, name: path(name))


@dataclass(frozen=True, slots=True)
class Report:
    """Measurements of an accepted network; ratios are to the current version, None for a first version.

    Args:
        size_bytes: the network and its external data.
        latency_ms: median of one row on one thread.
        difference: the largest over all inputs, relative to the current version's largest |output|.
    """

    sha256: str
    size_bytes: int
    opset: int
    ir_version: int
    latency_ms: float
    slowdown: float | None
    memory_bytes: int
    memory_ratio: float | None
    difference: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FoundObject:
    """An object in an image: label, score, and box (left, top, right, bottom in pixels)."""

    label: str
    score: float
    box: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Survey:
    """The results of a first run.

    Args:
        can_batch: whether the rows of a batch get the same outputs as alone.
        activation: the function that turns scores into probabilities; `none` if they are.
        meaning: of the scores, in words.
        top_classes: per image the indices of the largest scores, the largest first; () without scores.
        objects: per image the objects, the best score first; () for other tasks.
        lines: per image the lines of text; () for other tasks.
    """

    can_batch: bool
    activation: Activation = "none"
    meaning: str = ""
    top_classes: tuple[tuple[int, ...], ...] = ()
    objects: tuple[tuple[FoundObject, ...], ...] = ()
    lines: tuple[tuple[str, ...], ...] = ()

    def served_with(self, activation: Activation) -> "Survey":
        """Return what is seen if this function is appended; logits without one are no probabilities."""
        if activation == "none" and self.activation == "softmax":
            return replace(self, meaning="values as the network returns them")
        return self


class Rejected(OperationFailed):
    """The network must not be served; the message is the reason on one line."""


class ExaminationFailed(OperationFailed):
    """The examination failed for a reason outside the network."""


def examine(
    request: ExaminationRequest,
    timeout_s: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Examine a network in a separate process, which ends with this one.

    Args:
        request: the network and its limits.
        timeout_s: time after which the process is killed; by default 60 s, and 1 s more for each 10 MiB.
        progress: receives a line before each step.

    Raises:
        Rejected: the network must not be served, crashed the process, or exceeded the time.
        ExaminationFailed: the examination itself failed, for example because the `onnx` package is missing.
    """
    return msgspec.convert(_run(request, timeout_s, progress), Report)


def survey(
    request: ExaminationRequest,
    timeout_s: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Survey:
    """Run a network for the first time; arguments and errors as `examine`."""
    return msgspec.convert(_run(replace(request, is_survey=True), timeout_s, progress), Survey)


def _run(request: ExaminationRequest, timeout_s: float | None, progress: Callable[[str], None]) -> Any:
    """Return the content of the process's report."""
    if timeout_s is None:
        files = [path for path in request.candidate.rglob("*") if path.is_file()]
        timeout_s = TIMEOUT_S + sum(path.stat().st_size for path in files) / BYTES_PER_S
    try:
        kind, content = child.run(EXAMINER, request.to_json().decode(), timeout_s, progress)
    except child.NoResult as end:
        if end.is_late:
            raise Rejected(
                f"the examination of '{request.model}' was stopped: expected a result within "
                f"{timeout_s:.3g} s, last step: {end.last}"
            ) from None
        raise _crash(request.model, end) from None
    if kind == "rejected":
        raise Rejected(content)
    if kind == "failed":
        raise ExaminationFailed(content)
    return content


def _crash(model: str, end: child.NoResult) -> OperationFailed:
    text = f"last step: {end.last}" + (f"; its last output: {end.output}" if end.output else "")
    if end.status < 0:
        name = signal.Signals(-end.status).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return Rejected(f"the examination of '{model}' crashed with {name}{hint}, {text}")
    return ExaminationFailed(f"the examination of '{model}' failed with exit code {end.status}, {text}")
