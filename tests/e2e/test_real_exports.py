"""Detectors as today's frameworks export them, added without an option: their own boxes within a pixel."""

import os
import subprocess
import sys

import pytest

from tests import real_exports
from tests.commands import captured

pytestmark = pytest.mark.nightly(minutes=9)
TORCH = "torch==2.13.0"
# Of packages that need PyTorch, only those that an export needs and this environment lacks.
PACKAGES = ("torchvision==0.28.0", "ultralytics==8.4.190", "ultralytics-thop==2.2.3", "onnxslim==0.1.98")
OTHER_PACKAGES = ("transformers==5.24.0", "tensorflow-cpu==2.21.0", "tf2onnx==1.17.0")


@pytest.fixture(scope="module")
def exported(tmp_path_factory, root):
    """The folder with a folder per family: its exports, and its framework's objects."""
    base = tmp_path_factory.mktemp("exports")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target"]
    installed = ("torch", [TORCH]), ("torch", ["--no-deps", *PACKAGES]), ("others", OTHER_PACKAGES)
    for target, packages in installed:
        subprocess.run([*install, base / target, *packages], check=True, timeout=1800)
    for script, families, paths in (
        ("detectors.py", real_exports.ULTRALYTICS, ("torch",)),
        ("other_detectors.py", real_exports.OTHERS, ("others", "torch")),
    ):
        path = os.pathsep.join(str(base / name) for name in paths)
        env = os.environ | {"PYTHONPATH": path, "YOLO_CONFIG_DIR": str(base)}
        for family in families:
            (folder := base / family).mkdir()
            words = [root / "tools/export" / script, real_exports.write_photo(folder, family), folder, family]
            done = captured([sys.executable, *words], cwd=folder, env=env, timeout=600)
            assert done.returncode == 0, done.stderr[-2000:]
    return base


@pytest.mark.parametrize("axes", real_exports.AXES)
@pytest.mark.parametrize("family", real_exports.ULTRALYTICS + real_exports.OTHERS)
def test_boxes_are_those_of_the_framework(exported, tmp_path, family, axes):
    real_exports.assert_same_objects(exported / family, family, axes, tmp_path / "models")
