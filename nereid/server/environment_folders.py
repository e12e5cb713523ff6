"""Triton's folders for Python environments, which lie in /tmp."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


class EnvironmentFolders:
    """The folders of one server, noted when it is ready.

    Triton 24.10 makes an empty one for each Python-based backend, whatever TMPDIR says. If a program that
    cleans /tmp has removed one, Triton aborts at its end.

    Source: triton-inference-server/python_backend r24.10, `EnvironmentManager` in `src/pb_env.cc`.

    Args:
        parent: where Triton makes them.
    """

    def __init__(self, parent: Path = Path("/tmp")) -> None:
        self._parent, self._own = parent, set[Path]()
        self._before = self._present()

    def note(self) -> None:
        """Note the folders that have come since, also those of servers that started at the same time."""
        self._own = self._present() - self._before

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Make the missing ones again while the server ends, in the context."""
        missing = [each for each in self._own if not each.exists()]
        for each in missing:
            each.mkdir(mode=0o700, exist_ok=True)
        yield
        for each in missing:
            with contextlib.suppress(OSError):  # Triton has removed it
                each.rmdir()

    def _present(self) -> set[Path]:
        return {*self._parent.glob("python_env_*")}
