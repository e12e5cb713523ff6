"""Mutated image files: each is decoded or refused, with no crash, no hang and no growth of memory.

As a module, this file is the process that decodes them: `python -m tests.unit.test_mutated_files COUNT`.
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

from nereid.imaging.decode import Limits
from nereid.imaging.preprocessor import CpuPreprocessor
from nereid.imaging.transform import Transform
from nereid.serving_errors import InvalidImage
from tests.unit.image_mutations import mutated_files

ROOT = Path(__file__).resolve().parents[2]
FILES = 2_000
FEW_FILES = 200
# A file takes about 1 ms, the start of the process a second, on one core of a cloud machine.
WATCHDOG_S_PER_FILE = 0.1
GROWTH_BYTES = 64 * 2**20
TRANSFORM = Transform(64, 64, resize="letterbox")


def resident_bytes():
    """Return the memory of this process, without freed memory that the C library still holds."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def answer(count):
    """Decode the files one by one; print the outcomes for `answered`."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    preprocessor = CpuPreprocessor(TRANSFORM, Limits(), 1)
    early = 0
    for index, (name, file) in enumerate(mutated_files(count)):
        print(json.dumps({"began": name}), flush=True)
        preprocessor.tensor[:] = np.nan
        (error,) = preprocessor.prepare([file])
        is_whole = bool(np.isfinite(preprocessor.tensor).all())
        kind = "" if error is None else type(error).__name__
        text = "" if error is None else str(error)
        print(json.dumps({"kind": kind, "text": text, "is_whole": is_whole}), flush=True)
        if index == FEW_FILES - 1:
            early = resident_bytes()
    print(json.dumps({"growth_bytes": resident_bytes() - early}), flush=True)


def answered(count):
    """Run `answer` in its own process; return the outcomes by file name, and the growth of its memory."""
    command = [sys.executable, "-m", "tests.unit.test_mutated_files", str(count)]
    limit_s = 30 + count * WATCHDOG_S_PER_FILE
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, errors="replace", cwd=ROOT
        )
    except subprocess.TimeoutExpired as expired:
        last = (expired.stdout or b"").decode(errors="replace").splitlines()[-1:]
        pytest.fail(f"not done after {limit_s} s, at {last}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"died with {done.returncode} at {lines[-1:]}: {done.stderr[-2000:]}"
    names = [line["began"] for line in lines if "began" in line]
    answers = [line for line in lines if "kind" in line]
    return dict(zip(names, answers, strict=True)), lines[-1]["growth_bytes"]


def wrong(answers):
    """Return the outcomes that are neither a complete row nor an InvalidImage."""
    allowed = {"", InvalidImage.__name__}
    return {
        name: given
        for name, given in answers.items()
        if given["kind"] not in allowed
        or (not given["kind"] and not given["is_whole"])
        or (given["kind"] and not given["text"].startswith(InvalidImage.prefix))
    }


def test_many_mutated_files_are_answered():
    answers, growth_bytes = answered(FILES)

    assert len(answers) == FILES
    assert wrong(answers) == {}
    refused = sum(bool(given["kind"]) for given in answers.values())
    assert FILES / 10 < refused < FILES * 9 / 10
    assert growth_bytes < GROWTH_BYTES


if __name__ == "__main__":
    answer(int(sys.argv[1]))
