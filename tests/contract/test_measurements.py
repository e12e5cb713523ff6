"""The command lines of the measurements."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

IS_PROGRAM = 'if __name__ == "__main__":'
SCRIPTS = sorted(path.stem for path in (ROOT / "loadtest").glob("*.py") if IS_PROGRAM in path.read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_explains_its_options(script):
    """Argparse formats the help only when it is shown, and fails then."""
    command = [sys.executable, "-m", f"loadtest.{script}", "--help"]

    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert re.search(r"^options:", shown, re.M)
