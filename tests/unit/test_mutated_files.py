"""Mutated image files: each is decoded or refused, with no crash, no hang and no growth of memory.

As a module, this file is the process that decodes them: `python -m tests.unit.test_mutated_files`.
"""

import ctypes
import faulthandler
import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from loadtest.attack.image_mutations import mutated_files
from nereid.base.errors import InvalidImage
from nereid.vision.imaging.decode import ImageLimits
from nereid.vision.imaging.preprocessor import CpuPreprocessor
from nereid.vision.imaging.transform import Transform
from tests.commands import captured

ROOT = Path(__file__).resolve().parents[2]
FILES = 2_000
FEW_FILES = 200
# A file takes about 1 ms, the start of the process a second, on one core of a cloud machine.
WATCHDOG_S = 900


def resident_bytes():
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def answer():
    """Decode the files one by one; print each name before, and the outcome of all at the end."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    preprocessor = CpuPreprocessor(Transform(64, 64, resize="letterbox"), ImageLimits(), 1)
    refused, wrong, early = 0, [], 0
    for index, (name, file) in enumerate(mutated_files(FILES)):
        print(json.dumps(name), flush=True)
        preprocessor.tensor[:] = np.nan
        (error,) = preprocessor.prepare([file])
        refused += error is not None
        is_refused = type(error) is InvalidImage and str(error).startswith(InvalidImage.prefix)
        if not (is_refused if error else np.isfinite(preprocessor.tensor).all()):
            wrong.append(f"{name}: {error!r}")
        if index == FEW_FILES - 1:
            early = resident_bytes()
    print(json.dumps({"refused": refused, "wrong": wrong, "growth_bytes": resident_bytes() - early}))


def test_many_mutated_files_are_answered():
    command = [sys.executable, "-m", "tests.unit.test_mutated_files"]
    try:
        done = captured(command, timeout=WATCHDOG_S, errors="replace", cwd=ROOT)
    except subprocess.TimeoutExpired as expired:
        last = (expired.stdout or b"").decode(errors="replace").splitlines()[-1:]
        pytest.fail(f"not done after {WATCHDOG_S} s, at {last}")
    *names, last = done.stdout.splitlines() or [""]
    assert done.returncode == 0, f"died with {done.returncode} at {last}: {done.stderr[-2000:]}"

    outcome = json.loads(last)
    assert (len(names), outcome["wrong"]) == (FILES, [])
    assert FILES / 10 < outcome["refused"] < FILES * 9 / 10
    assert outcome["growth_bytes"] < 64 * 2**20


@pytest.mark.process
def test_mutated_files_are_answered_by_every_command():
    """Networks and images for `add`, `check`, `publish`, `watch`, and the command of each task."""
    command = [sys.executable, "-m", "loadtest.attack.files", "--cases", str(FEW_FILES)]

    done = captured(command, timeout=WATCHDOG_S, cwd=ROOT)

    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    answer()
