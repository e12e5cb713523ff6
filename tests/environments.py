"""Virtual environments of their own, whose programs a test runs as a user does."""

import os
import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.commands import captured
from tests.supervised import announcing

TIMEOUT_S = 900


@dataclass(frozen=True)
class Environment:
    """An active environment, and the folder in which its programs run, which know nothing of this one."""

    path: Path
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
        path = f"{self.path / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        return kept | {"PATH": path, "XDG_RUNTIME_DIR": str(self.path.parent)}

    def words(self, *words: object) -> list[str]:
        return [str(self.path / "bin" / str(words[0])), *map(str, words[1:])]

    def captured(self, *words: object, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run a program of the environment, or of a whole path."""
        environment = self.variables | variables
        return captured(self.words(*words), cwd=self.folder, env=environment, timeout=TIMEOUT_S)

    def run(self, *words: object, **variables: str) -> str:
        """Run a program that must succeed, and return its stdout."""
        done = self.captured(*words, **variables)
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
        return done.stdout

    def announcing(self, log: Path, *words: object) -> AbstractContextManager[tuple[Any, dict[str, int]]]:
        """Run a program that keeps its terminal; gives its process, and the ports of its first line."""
        return announcing(self.words(*words), log, env=self.variables, cwd=self.folder)
