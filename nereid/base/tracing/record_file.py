"""The files of a server with its last records, one for each line."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from nereid.base.tracing.records import Record

# About 25,000 requests.
MAX_FILE_BYTES = 32 * 2**20
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class RecordFile:
    """Keeps the last records in a file; when it is full, it becomes the file before.

    Args:
        path: the file; the one before has `.1` behind its name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, records: Sequence[bytes]) -> None:
        """Append records; a full disk loses them."""
        with contextlib.suppress(OSError):
            if self._path.exists() and self._path.stat().st_size > MAX_FILE_BYTES:
                self._path.replace(_before(self._path))
            self._path.touch(mode=0o600)
            size = self._path.stat().st_size
            try:
                with self._path.open("ab") as file:
                    file.write(b"".join(record + b"\n" for record in records))
            except OSError:  # the next record must begin a line
                with self._path.open("r+b") as file:
                    file.truncate(size)


def read(path: Path) -> Iterator[Record]:
    """Yield the records, oldest first; damaged ones, and one that is being written, are left out."""
    # The newer file first: it may become the older one in between.
    texts = [_text(path), _text(_before(path))]
    for text in reversed(texts):
        for line in text.split(b"\n"):
            with contextlib.suppress(msgspec.DecodeError):
                record = _decode(line)
                if record.keys() >= {"trace", "kind", "begin", "end", "parent", "span", "name", "about"}:
                    yield record


def _before(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
