"""Detectors as today's Ultralytics exports them, added without an option: its own boxes within a pixel."""

import os
import subprocess
import sys

import pytest

from tests import real_exports

pytestmark = pytest.mark.nightly(minutes=3)
# Of Ultralytics' packages, only those that an export needs and this environment lacks.
PACKAGES = ("torchvision==0.28.0", "ultralytics==8.4.190", "ultralytics-thop==2.2.3", "onnxslim==0.1.98")
TORCH = "torch==2.13.0"


@pytest.fixture(scope="module")
def exported(tmp_path_factory, root):
    """The folder of the exports and of Ultralytics' objects."""
    folder = real_exports.write_photos(tmp_path_factory.mktemp("ultralytics"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder / "packages"]
    for packages in ([TORCH], ["--no-deps", *PACKAGES]):
        subprocess.run([*install, *packages], check=True, timeout=1800)
    env = os.environ | {"PYTHONPATH": str(folder / "packages"), "YOLO_CONFIG_DIR": str(folder)}
    for family in real_exports.FAMILIES:
        words = [root / "tools/export/detectors.py", real_exports.photo_for(family), folder, family]
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("axes", real_exports.AXES)
@pytest.mark.parametrize("family", real_exports.FAMILIES)
def test_boxes_are_those_of_ultralytics(exported, tmp_path, family, axes):
    real_exports.assert_same_objects(exported, family, axes, tmp_path / "models")
