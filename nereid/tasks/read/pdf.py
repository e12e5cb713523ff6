"""PDF files, opened in a separate process that may crash or exhaust its time or memory without harm."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nereid.base.contract import PAGE_SIZE
from nereid.base.errors import InferenceFailed, InvalidImage
from nereid.vision.imaging.formats.image_header import is_pdf

# Longer side of a rendered page: A4 at 214 dpi, the resolution at which bars are searched for.
SIDE_PX = 2500
# Memory limit of the process: libraries, a page of 25 MB, and what the file unpacks to.
MAX_BYTES = 2**30
# Time limits for one page, and for adding text to a file.
MAX_PAGE_S, MAX_TEXT_S = 20, 30
MAX_LINE_BYTES = 2**16
_PROCESS = Path(__file__).with_name("pdf_process.py")


def pages(encoded: bytes, max_pages: int) -> Iterator[np.ndarray]:
    """Yield each page of a PDF file as RGB pixels, uint8[H, W, 3]; the longer side is `SIDE_PX`.

    Raises:
        InvalidImage: the file is damaged or encrypted, has no page or more than `max_pages`, or needs too
            much time or memory.
    """
    request = {"max_pages": max_pages, "side_px": SIDE_PX, "max_s": MAX_PAGE_S * max_pages}
    for about, content in _parts(request, encoded, MAX_PAGE_S):
        width, height = about["size_wh"]
        yield np.frombuffer(content, np.uint8).reshape(height, width, 3)


def searchable(encoded: bytes, reading: Any) -> bytes:
    """Convert an image or a PDF file to a PDF file whose text can be searched and copied.

    Args:
        encoded: the file that was read.
        reading: the result: a `Reading` or a gateway response.

    Raises:
        InvalidImage: the file cannot be opened or needs too much time or memory, or the model that read it
            returns no pages.
    """
    if not reading.pages:
        raise InvalidImage(
            f"model '{reading.model}' has no output '{PAGE_SIZE}', which a searchable PDF needs"
        )
    pages = [
        {
            "size_wh": (page.width, page.height),
            "lines": [(line.text, line.box) for line in reading.lines if line.page == number],
        }
        for number, page in enumerate(reading.pages, 1)
    ]
    request = {"pages": pages, "is_pdf": is_pdf(encoded), "max_s": MAX_TEXT_S}
    return b"".join(content for _, content in _parts(request, encoded, MAX_TEXT_S))


def _parts(
    request: Mapping[str, Any], encoded: bytes, timeout_s: float
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the parts of the process's response; after each, the process waits for the caller."""
    process = subprocess.Popen(
        [sys.executable, "-P", str(_PROCESS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin
    with process:
        try:
            with _killed_after(process, timeout_s), contextlib.suppress(BrokenPipeError):
                header = json.dumps({**request, "max_bytes": MAX_BYTES}).encode()
                try:
                    process.stdin.writelines((header, b"\n", encoded))
                finally:
                    process.stdin.close()
            while part := _part(process, timeout_s):
                yield part
        finally:
            process.kill()


def _part(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[dict[str, Any], bytes] | None:
    """Return the next part; None at the end."""
    assert process.stdout
    with _killed_after(process, timeout_s):
        line = process.stdout.readline(MAX_LINE_BYTES)
        about = json.loads(line) if line.endswith(b"\n") else {}
        content = process.stdout.read(about.get("bytes", 0))
        if "error" in about:
            raise InvalidImage(f"PDF: {about['error']}")
        if about and len(content) == about["bytes"]:
            return about, content
        status = process.wait()
    if status > 0:
        raise InferenceFailed(f"the process that opens PDF files ended with status {status}")
    if status:
        raise InvalidImage(
            f"expected a PDF that opens within {timeout_s} s a page and {MAX_BYTES >> 20} MiB, "
            f"but its process was killed by {signal.Signals(-status).name}"
        )
    return None


@contextlib.contextmanager
def _killed_after(process: subprocess.Popen[bytes], timeout_s: float) -> Iterator[None]:
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
