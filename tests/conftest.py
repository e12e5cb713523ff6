"""What several layers of tests share: paths, photos, and images made in memory."""

import io
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from PIL import Image

# How fast an example runs says nothing on a busy machine.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

ROOT = Path(__file__).resolve().parent.parent
# Files of long tests, the longest first: the last one to begin decides when a parallel run ends.
LONG_FILES = (
    *("containers", "user_models", "supervision", "rollout", "soak", "hostile_text", "publish_long"),
    *("deploy_install", "chaos", "detection", "reading", "tune", "long", "wheel", "deploy_policy", "bench"),
    *("tune_tasks", "drift", "add_reader", "own_recogniser", "install_offline", "your_model", "load"),
)
BEGAN_S = pytest.StashKey[float]()
# How to turn stored pixels upright. Source: CIPA DC-008, 4.6.4: where the stored row 0 and column 0 are seen.
UPRIGHT = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored.swapaxes(0, 1)[::-1, ::-1],
    8: lambda stored: np.rot90(stored, 1),
}


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note when the run began, so that it removes only what it left itself."""
    session.config.stash[BEGAN_S] = time.time()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files."""
    places = {f"test_{name}": place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the empty folders that killed Triton servers leave in the temporary folder."""
    if hasattr(session.config, "workerinput"):
        return
    for folder in Path(tempfile.gettempdir()).glob("python_env_*"):
        status = folder.stat()
        if (
            status.st_uid == os.getuid()
            and status.st_mtime >= session.config.stash[BEGAN_S]
            and not any(folder.iterdir())
        ):
            folder.rmdir()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List why tests were skipped, most frequent first, so that a missing tool is seen."""
    reasons = Counter(
        each.longrepr[2].removeprefix("Skipped: ") for each in terminalreporter.stats.get("skipped", [])
    )
    if reasons:
        terminalreporter.section("skipped tests, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5} {reason}")


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def encode() -> Callable[..., bytes]:
    """Encode uint8 pixels as an image file: `encode(pixels, "PNG", **options)`."""

    def encode_image(
        pixels: np.ndarray, image_format: str = "PNG", mode: str | None = None, **options: Any
    ) -> bytes:
        target = io.BytesIO()
        image = Image.fromarray(pixels)
        (image.convert(mode) if mode else image).save(target, image_format, **options)
        return target.getvalue()

    return encode_image


@pytest.fixture
def gradient() -> Callable[[int, int], np.ndarray]:
    """A smooth RGB picture, uint8[H, W, 3]; smooth, so that JPEG changes it little."""

    def make(height: int, width: int) -> np.ndarray:
        rows, columns = np.linspace(0, 255, height), np.linspace(0, 255, width)
        planes = np.broadcast_arrays(rows[:, None], columns[None, :], np.float64(96))
        return np.asarray(np.stack(planes, axis=-1), np.uint8)

    return make
