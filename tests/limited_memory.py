"""Runs of a network in a process whose memory is limited: `python -m tests.limited_memory FOLDER ROWS MIBS`.

A process of its own has no free memory of earlier tests, so that an allocation fails where it should.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import ServingError
from nereid.vision.inference.session import Session, SessionEvents
from tests.commands import captured
from tests.conftest import ROOT
from tests.faulty_networks import MEBIBYTE

TIMEOUT_S = 120


def run_limited(folder: Path, before: list[int], rows: int, mebibytes: int) -> dict[str, Any]:
    """Run a model of `wide` in a new process: the rows `before` the limit, `rows` with it, and without it.

    Returns the `error` of the limited run, empty if it was right; `halved` batches, and `runs` by rows.
    """
    words = [str(folder), json.dumps(before), str(rows), str(mebibytes)]
    done = captured([sys.executable, "-m", "tests.limited_memory", *words], cwd=ROOT, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


def _main(folder: str, before: str, rows: str, mebibytes: str) -> None:
    runs: list[int] = []
    halved: list[int] = []
    session = Session.from_config(
        ModelConfig.from_file(Path(folder), 1),
        events=SessionEvents(lambda seconds, count: runs.append(count), lambda: halved.append(1)),
    )
    for count in json.loads(before):
        _run(session, count)
    runs.clear()
    _limit(int(mebibytes))
    error = _run(session, int(rows))
    _limit(None)
    error = error or _run(session, int(rows))
    print(json.dumps({"error": error, "halved": len(halved), "runs": runs}))


def _run(session: Session, rows: int) -> str:
    x = np.arange(1, rows + 1, dtype=np.float32).reshape(-1, 1)
    try:
        (y,) = session.run({"x": x}, ["y"])
    except ServingError as error:
        return f"{type(error).__name__}: {error}"
    return "" if np.array_equal(x, y) else f"expected {x.tolist()}, got {y.tolist()}"


def _limit(mebibytes: int | None) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = hard if mebibytes is None else pages * resource.getpagesize() + mebibytes * MEBIBYTE
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    _main(*sys.argv[1:])
