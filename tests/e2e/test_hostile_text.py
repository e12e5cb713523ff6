"""Hostile images for a reader of text: each is read, in bounded time and memory."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from PIL import Image

from loadtest.resource_usage import memory_bytes
from nereid.base.contract import MAX_LINES
from nereid.tasks.read.reading_settings import DEFAULT_MAX_READ_S
from tests.e2e.conftest import url
from tests.labels import LABEL, WORDS, label
from tests.pictures import encode, save
from tests.readers import page
from tests.routes import WATCHDOG_S

pytest.importorskip("cv2", reason="opencv is not installed: extra text")
pytestmark = pytest.mark.nightly(minutes=4)
CALLERS = 4
GROWTH_BYTES = 256 * 2**20


def hostile_pictures() -> Iterator[tuple[str, bytes]]:
    """Yield images that are whole, and made to find very many boxes, or odd ones."""
    random = np.random.default_rng(1)
    yield "noise", encode(random.integers(0, 256, (736, 736, 3), np.uint8))
    for size in (4, 8, 16, 32):
        rows, columns = np.mgrid[0:736, 0:1200] // size
        yield f"chess of {size}", encode(np.where((rows + columns) % 2, 255, 0).astype(np.uint8))
        yield f"bars of {size}", encode(np.where(columns % 2, 255, 0).astype(np.uint8))
    dots = np.full((1500, 1500), 255, np.uint8)
    for top in range(5, 1490, 14):
        for left in range(5, 1490, 14):
            dots[top : top + 7, left : left + 3] = 0
    yield "10,000 strokes", encode(dots)
    for width, height in ((1, 1), (1, 3000), (3000, 1), (2, 2), (5000, 20), (20, 5000), (6000, 4000)):
        yield f"{width} x {height}", encode(np.zeros((height, width), np.uint8))
    yield "crowded", save(page(["x1 y2 z3 " * 20] * 20, 12, 1400))
    picture = label(*WORDS)
    for turn in (90, 180, 270):
        yield f"turned by {turn}", save(picture.rotate(turn, expand=True))
    yield "mirrored", save(picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT))


def outcome(client: httpx.Client, address: str, image: bytes) -> str:
    """Send an image; returns an empty text for an answer, else the refusal."""
    response = client.post(address, content=image, headers={"inference-header-content-length": "0"})
    if response.status_code == 200:
        size = int(response.headers["inference-header-content-length"])
        shapes = {item["name"]: item["shape"] for item in json.loads(response.content[:size])["outputs"]}
        assert shapes["text"][0] == 1
        assert shapes["text"][1] <= MAX_LINES
        assert shapes["box"] == [*shapes["text"], 4, 2]
        return ""
    assert response.status_code == 400, response.text
    return str(response.json()["error"])


def send_all(text_server, images) -> list[tuple[str, str]]:
    address = f"http://{url(text_server, 'http')}/v2/models/read_text_v1/infer"
    with httpx.Client(timeout=WATCHDOG_S) as client, ThreadPoolExecutor(CALLERS) as pool:
        return list(pool.map(lambda named: (named[0], outcome(client, address, named[1])), images))


def test_hostile_images_are_read_within_bounds(text_server):
    send_all(text_server, [("label", LABEL)])
    before = memory_bytes(text_server.pid)

    outcomes = send_all(text_server, hostile_pictures())

    limits = re.compile(f"lines of text|read within {DEFAULT_MAX_READ_S:g} s")
    assert [text for _, text in outcomes if text and not limits.search(text)] == []
    assert memory_bytes(text_server.pid) - before < 4 * GROWTH_BYTES
