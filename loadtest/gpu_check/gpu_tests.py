"""The tests of tests/gpu, as a part of a section."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from loadtest.gpu_check.sections import XDIST
from nereid.processes import available_cores

ROOT = Path(__file__).resolve().parents[2]
# Characters of a failure's message in the record.
MESSAGE_CHARACTERS = 400
# Time to write the results of a file of tests that was stopped.
MARGIN_S = 3.0


def run(files: Sequence[str], limit_s: float, processes: int = 1) -> dict[str, Any]:
    """Run files of tests/gpu for at most `limit_s` seconds; returns numbers and failures.

    Args:
        processes: run the tests in several processes, if pytest-xdist is installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        paths = [f"tests/gpu/{name}" for name in files]
        words = ["-m", "pytest", "-m", "gpu", "-rs", "--maxfail=5", "--quiet", f"--junitxml={report}"]
        # A test that hangs leaves the stack of every thread in the log.
        words += ["-o", f"faulthandler_timeout={max(1, round(limit_s / 2))}"]
        if processes > 1 and XDIST.is_installed:
            words += ["--numprocesses", str(min(processes, available_cores()))]
        try:
            subprocess.run([sys.executable, *words, *paths], cwd=ROOT, timeout=max(1.0, limit_s - MARGIN_S))
        except subprocess.TimeoutExpired:
            return {**outcomes("<testsuites/>"), "stopped_after_s": round(limit_s)}
        return outcomes(report.read_text() if report.exists() else "<testsuites/>")


def outcomes(report: str) -> dict[str, Any]:
    """Read pytest's JUnit report: numbers of passed, failed and skipped tests, and why tests failed."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failed = [(case, found) for case in cases for found in (*case.iter("failure"), *case.iter("error"))]
    skipped = [found for case in cases for found in case.iter("skipped")]
    names = {case.get("name", "") for case, _ in failed}
    return {
        "passed": len(cases) - len(skipped) - len(names),
        "failed": len(names),
        "skipped": len(skipped),
        "failures": {
            str(case.get("name")): str(found.get("message", ""))[:MESSAGE_CHARACTERS]
            for case, found in failed
        },
        "reasons_to_skip": sorted({str(found.get("message", "")) for found in skipped}),
    }
