"""A running `nereid watch` for tests."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.routes import WATCHDOG_S, wait_until

SETTLE_S = 0.6


class Watch:
    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process
        self.announced: list[str] = []
        self.reported: list[str] = []
        for stream, lines in ((process.stdout, self.announced), (process.stderr, self.reported)):
            threading.Thread(target=lambda s=stream, t=lines: t.extend(s), daemon=True).start()

    def wait(self, *starts: str) -> None:
        wait_until(lambda: len(self.announced) >= len(starts), f"{starts}: {self.announced} {self.reported}")
        heads = [announced[: len(start)] for announced, start in zip(self.announced, starts, strict=True)]
        assert heads == [*starts], (self.announced, self.reported)


@contextmanager
def watching(folder: Path, environment: Mapping[str, str], *words: str) -> Iterator[Watch]:
    command = [sys.executable, "-m", "nereid", "watch", str(folder), "--settle-s", str(SETTLE_S), *words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            watch = Watch(folder, process)
            wait_until(lambda: any(line.startswith("watching ") for line in watch.reported), "to be watched")
            yield watch
            process.send_signal(signal.SIGTERM)
            assert process.wait(WATCHDOG_S) == 0
        finally:
            process.kill()
