"""Whether a network may take the place of another: asked of a process of its own, which may fall.

A broken network can end the process that opens it, or take all memory; the server never meets it, and the
command that asks survives it. `nereid.publish.examination.examiner` is that process.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from nereid.errors import OperationFailed

EXAMINER = ("-P", "-m", "nereid.publish.examination.examiner")
PATHS = ("candidate", "current", "preprocess", "labels")


@dataclass(frozen=True, slots=True)
class ExaminationRequest:
    """What is asked about a network.

    Args:
        model: its name, for messages.
        candidate: a version folder, numbered or not.
        document: the model's config, with protobuf field names.
        current: the version folder it is compared with; None for a first version.
        preprocess: folder of the model that makes inputs of images; None for random inputs of a fixed seed.
        preprocess_version: of that model.
        images: golden images, encoded.
        tolerance: greatest difference of outputs, relative to the current version's largest |output|.
        accept_change: whether other answers are meant.
        max_slowdown: greatest ratio of median latencies.
        max_memory_ratio: greatest ratio of memory.
        labels: label file to count against the classes of the output.
    """

    model: str
    candidate: Path
    document: Mapping[str, Any]
    current: Path | None
    preprocess: Path | None
    preprocess_version: int
    images: tuple[Path, ...]
    tolerance: float
    accept_change: bool
    max_slowdown: float
    max_memory_ratio: float
    labels: Path | None

    def to_json(self) -> str:
        """Write it as one line, with paths that hold in any working directory."""
        fields = {name: str(each.resolve()) if (each := getattr(self, name)) else None for name in PATHS}
        images = [str(image.resolve()) for image in self.images]
        return json.dumps(asdict(self) | fields | {"images": images})

    @classmethod
    def from_json(cls, text: str) -> "ExaminationRequest":
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        paths = {name: Path(fields[name]) if fields[name] else None for name in PATHS}
        return cls(**fields | paths | {"images": tuple(map(Path, fields["images"]))})


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured of a network that may be served; ratios are to the current version, if there is one.

    `difference` is the greatest over the inputs, relative to the current version's largest |output|;
    `size_bytes` includes external data; `latency_ms` is the median of one row on one thread.
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


class Rejected(OperationFailed):
    """The network is not to be served; the message is the reason, on one line."""


class ExaminationFailed(OperationFailed):
    """The network was not examined, by no fault of its own."""


def _ignore(line: str) -> None:
    pass


def examine(
    question: ExaminationRequest, timeout_s: float = 600.0, progress: Callable[[str], None] = _ignore
) -> Report:
    """Examine a network in a process of its own, which is ended with this one.

    Args:
        timeout_s: after which the process is killed.
        progress: called with a line about each step before it is made.

    Raises:
        Rejected: the network is not to be served, ended the process, or was not done in time.
        ExaminationFailed: the examination itself failed, such as for want of the `onnx` package.
    """
    with tempfile.TemporaryFile() as errors, _process(errors) as process:
        is_late = threading.Event()
        timer = threading.Timer(timeout_s, _give_up, (process, is_late))
        timer.start()
        try:
            report, last = _converse(process, question, progress)
            status = process.wait()
        finally:
            timer.cancel()
        if report:
            return report
        if is_late.is_set():
            late = f"was ended after {timeout_s:g} s"
            raise Rejected(f"the examination of '{question.model}' {late}, while it was: {last}")
        raise _unanswered(question.model, status, last, errors)


@contextlib.contextmanager
def _process(errors: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
    """Start the examiner in a session of its own; whatever happens, its process group is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, *EXAMINER, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _give_up(process: subprocess.Popen[str], is_late: threading.Event) -> None:
    is_late.set()
    _kill(process)


def _converse(
    process: subprocess.Popen[str], question: ExaminationRequest, progress: Callable[[str], None]
) -> tuple[Report | None, str]:
    """Return the report if there is one, and the last line of progress."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it ended already; its status says how
        process.stdin.write(question.to_json())
        process.stdin.close()
    report, last = None, "starting"
    for line in process.stdout:
        try:
            ((kind, content),) = json.loads(line).items()
        except ValueError:  # a line that was cut off when the process ended
            break
        if kind == "progress":
            last = content
            progress(content)
        elif kind == "rejected":
            raise Rejected(content)
        elif kind == "failed":
            raise ExaminationFailed(content)
        else:
            report = Report(**content | {"notes": tuple(content["notes"])})
    return report, last


def _unanswered(model: str, status: int, last: str, errors: IO[bytes]) -> OperationFailed:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    said = f"; it said: {lines[-1].strip()}" if lines else ""
    if status < 0:
        name = signal.Signals(-status).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        ended = f"the examination of '{model}' ended with {name}{hint}, while it was: {last}"
        return Rejected(f"{ended}{said}")
    return ExaminationFailed(
        f"the examination of '{model}' failed (status {status}), while it was: {last}{said}"
    )
