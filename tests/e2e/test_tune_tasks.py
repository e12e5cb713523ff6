"""`nereid watch` for detectors and readers."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import pytest

from nereid import Detector, Reader
from nereid.assets import COFFEE
from tests.detectors import KNOWN, TestDetector, add_detector, moved
from tests.labels import LABEL, WORDS
from tests.recognisers import retrained
from tests.supervised import serving
from tests.tasks import add_reader
from tests.watches import watching

pytest.importorskip("cv2", reason="opencv is not installed: extra text")
pytestmark = pytest.mark.nightly(minutes=2)

PROFILES = ("cpu", "ensemble")


@contextmanager
def dropped(repository: Path, profile: str, name: str, source: Path, tmp_path: Path) -> Iterator[str]:
    """Serve a repository, publish a network by its drop folder, and give the server's HTTP address."""
    (drop := tmp_path / "drop").mkdir()
    with serving(repository, tmp_path / "run", "--profile", profile) as served:
        environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path / "run")}
        words = "--repository", str(repository), "--accept-change", "--max-slowdown", "100"
        with watching(drop, environment, *words) as watch:
            shutil.copy(source, drop / f"{name}@next.onnx")
            watch.wait(f"{name}@next.onnx: published as version 2 of ")
            yield f"127.0.0.1:{served.ports['http']}"


@pytest.mark.parametrize("profile", PROFILES)
def test_dropped_detector_is_served(profile, tmp_path):
    onnx.save(TestDetector("yolov8", moved(KNOWN[:1])).build(), tmp_path / "next.onnx")

    with (
        dropped(add_detector(tmp_path), profile, "cars", tmp_path / "next.onnx", tmp_path) as url,
        Detector(url, "http", "cars") as detector,
    ):
        found = detector.detect(COFFEE, variant="v2")

    assert ([each.label for each in found.objects], found.variant) == (["dog"], "v2")


@pytest.mark.parametrize("profile", PROFILES)
def test_dropped_recogniser_is_served(profile, tmp_path):
    new = retrained(tmp_path / "next.onnx")

    with (
        dropped(add_reader(tmp_path), profile, "read_text", new, tmp_path) as url,
        Reader(url, "http") as reader,
    ):
        found = reader.read(LABEL, variant="v2")

    assert ([line.text for line in found.lines], found.variant) == (WORDS, "v2")
