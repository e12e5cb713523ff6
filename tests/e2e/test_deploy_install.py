"""Installation of the images in a clean environment: their size, and their backends."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from nereid.base.assets import ADAPTERS
from nereid.server.installation import find_installation
from tests.commands import captured
from tests.conftest import ROOT
from tests.deployment import SERVICES, SLIM, copies, instructions

# What the slim image may take, and what python:3.12-slim-bookworm takes of it, in MB, generously.
MOST_MB, BASE_MB = 600, 130
INSTALL_S = 900

pytestmark = pytest.mark.nightly(minutes=4)


@dataclass(frozen=True)
class Image:
    """The content of an image: a part of the checkout, and the environment."""

    workspace: Path
    environment: Path

    @property
    def variables(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))
        }
        path = f"{self.environment / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        return kept | {"PATH": path, "XDG_RUNTIME_DIR": str(self.workspace.parent)}

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess:
        return captured(words, cwd=self.workspace.parent, env=self.variables | variables, timeout=INSTALL_S)

    def install(self, *words: str, python: str) -> None:
        done = self.run(str(self.workspace / "deploy" / "install.sh"), *words, PYTHON=python)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    image = Image(folder / "workspace", folder / "nereid")
    for source, target in copies(SLIM):
        destination = image.workspace / target.removeprefix("/workspace/")
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / source, destination, ignore=ignored, dirs_exist_ok=True)
        else:
            destination = destination / Path(source).name if target.endswith("/") else destination
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / source, destination)
    (extras,) = (line.partition("=")[2] for line in instructions(SLIM, "ARG") if line.startswith("EXTRAS="))
    substitutes = {"/opt/nereid": str(image.environment), '"${EXTRAS}"': extras}
    for run in instructions(SLIM, "RUN"):
        _, script, words = run.partition("deploy/install.sh ")
        if script:
            image.install(*[substitutes.get(word, word) for word in words.split()], python=sys.executable)
    yield image
    shutil.rmtree(image.environment)


def test_image_is_small_and_has_a_gateway(image):
    """Installed and copied files leave room for the base image below the promised size."""
    folders = image.environment, image.workspace
    paths = [path for folder in folders for path in folder.rglob("*") if not path.is_symlink()]

    assert sum(path.stat().st_blocks * 512 for path in paths) / 1e6 < MOST_MB - BASE_MB
    done = image.run(str(image.environment / "bin" / "python"), "-c", "import nereid.cli.gateway")
    assert (done.returncode, done.stderr) == (0, "")


def test_image_of_nvidia_gets_only_backends_that_it_lacks(image, tmp_path):
    """The script of the other Dockerfile adds to a folder of backends, as NVIDIA's image has it."""
    python = find_installation({}).backends / "python"
    shutil.copytree(python, tmp_path / "backends" / "python", ignore=shutil.ignore_patterns("__pycache__"))
    system = Image(image.workspace, tmp_path / "system")
    subprocess.run([sys.executable, "-m", "venv", system.environment], check=True, timeout=INSTALL_S)
    extras = SERVICES["triton-cpu"]["build"]["args"]["EXTRAS"]
    ours = {path.parent.name: path for path in ADAPTERS.glob("*/model.py")}

    system.install(
        *("system", str(tmp_path / "backends"), extras), python=str(system.environment / "bin" / "python")
    )

    added = {path.name for path in (tmp_path / "backends").iterdir()} - {"python"}
    assert added == ours.keys() - {"onnxruntime"}
    for name in added:
        assert (tmp_path / "backends" / name / "model.py").read_bytes() == ours[name].read_bytes()
