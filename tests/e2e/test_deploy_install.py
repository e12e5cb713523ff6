"""Installation of the images in a clean environment: their size, and their backends."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nereid.base.assets import ADAPTERS
from nereid.server.installation import find_installation
from tests.conftest import ROOT
from tests.deployment import SERVICES, SLIM, copies, instructions
from tests.environments import TIMEOUT_S, Environment

# What the slim image may take, and what python:3.12-slim-bookworm takes of it, in MB, generously.
MOST_MB, BASE_MB = 600, 130
INSTALL = "workspace/deploy/install.sh"

pytestmark = pytest.mark.nightly(minutes=4)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """The content of the image: an environment, and in its folder a part of the checkout as `workspace`."""
    folder = tmp_path_factory.mktemp("image")
    image = Environment(folder / "nereid", folder)
    for source, target in copies(SLIM):
        destination = folder / "workspace" / target.removeprefix("/workspace/")
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / source, destination, ignore=ignored, dirs_exist_ok=True)
        else:
            destination = destination / Path(source).name if target.endswith("/") else destination
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / source, destination)
    (extras,) = (line.partition("=")[2] for line in instructions(SLIM, "ARG") if line.startswith("EXTRAS="))
    substitutes = {"/opt/nereid": str(image.path), '"${EXTRAS}"': extras}
    for run in instructions(SLIM, "RUN"):
        _, script, words = run.partition("deploy/install.sh ")
        if script:
            chosen = [substitutes.get(word, word) for word in words.split()]
            image.run(folder / INSTALL, *chosen, PYTHON=sys.executable)
    yield image
    shutil.rmtree(image.path)


def test_image_is_small_and_has_a_gateway(image):
    """Installed and copied files leave room for the base image below the promised size."""
    folders = image.path, image.folder / "workspace"
    paths = [path for folder in folders for path in folder.rglob("*") if not path.is_symlink()]

    assert sum(path.stat().st_blocks * 512 for path in paths) / 1e6 < MOST_MB - BASE_MB
    done = image.captured("python", "-c", "import nereid.cli.gateway")
    assert (done.returncode, done.stderr) == (0, "")


def test_image_of_nvidia_gets_only_backends_that_it_lacks(image, tmp_path):
    """The script of the other Dockerfile adds to a folder of backends, as NVIDIA's image has it."""
    python = find_installation({}).backends / "python"
    shutil.copytree(python, tmp_path / "backends" / "python", ignore=shutil.ignore_patterns("__pycache__"))
    system = Environment(tmp_path / "system", image.folder)
    subprocess.run([sys.executable, "-m", "venv", system.path], check=True, timeout=TIMEOUT_S)
    extras = SERVICES["triton-cpu"]["build"]["args"]["EXTRAS"]
    ours = {path.parent.name: path for path in ADAPTERS.glob("*/model.py")}

    words = "system", tmp_path / "backends", extras
    system.run(image.folder / INSTALL, *words, PYTHON=str(system.path / "bin" / "python"))

    added = {path.name for path in (tmp_path / "backends").iterdir()} - {"python"}
    assert added == ours.keys() - {"onnxruntime"}
    for name in added:
        assert (tmp_path / "backends" / name / "model.py").read_bytes() == ours[name].read_bytes()
