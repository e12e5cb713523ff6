"""Commands that tests run."""

import subprocess
from collections.abc import Sequence
from typing import Any


def captured(words: Sequence[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command with its output as texts."""
    return subprocess.run(words, capture_output=True, text=True, **options)
