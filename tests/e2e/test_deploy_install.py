"""Installation of the images: their files, script and command in a clean environment."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from nereid.assets import ADAPTERS, COFFEE
from nereid.gateway.admission import key_changes
from nereid.server.installation import find_installation
from nereid.triton import stub_processes
from tests.conftest import ROOT
from tests.deployment import SERVICES, SLIM, check_health, command_line, copies, instructions, listening
from tests.routes import wait_until
from tests.supervised import ANY_PORTS

# What the slim image may take, and what python:3.12-slim-bookworm takes of it, in MB, generously.
MOST_MB, BASE_MB = 600, 130
INSTALL_S, START_S, STOP_S = 900, 180, 90

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
        return subprocess.run(
            words,
            cwd=self.workspace.parent,
            env=self.variables | variables,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
        )

    def install(self, *words: str, python: str) -> None:
        done = self.run(str(self.workspace / "deploy" / "install.sh"), *words, PYTHON=python)
        assert done.returncode == 0, done.stderr[-3000:]

    def check(self, port: int) -> tuple[int, str]:
        return check_health("--page", f"http://127.0.0.1:{port}/readyz", workspace=self.workspace)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    image = Image(folder / "workspace", folder / "nereid")
    for source, target in copies(SLIM):
        place = image.workspace / target.removeprefix("/workspace/")
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / source, place, ignore=ignored, dirs_exist_ok=True)
        else:
            place = place / Path(source).name if target.endswith("/") else place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / source, place)
    (extras,) = (each.partition("=")[2] for each in instructions(SLIM, "ARG") if each.startswith("EXTRAS="))
    places = {"/opt/nereid": str(image.environment), '"${EXTRAS}"': extras}
    for run in instructions(SLIM, "RUN"):
        _, script, words = run.partition("deploy/install.sh ")
        if script:
            image.install(*[places.get(word, word) for word in words.split()], python=sys.executable)
    yield image
    shutil.rmtree(image.environment)


@contextmanager
def started(image: Image, words: Sequence[str], log: Path, **variables: str):
    """Run `nereid` with a command of an image until the server is ready; yields process and ports.

    It is on free ports of the loopback. Its keys are in `keys.json`, in the folder of the log.
    """
    keys = log.with_name("keys.json")
    ours = [*ANY_PORTS, "--host", "127.0.0.1", "--require-keys", "--keys", str(keys), "--drain-s", "0"]
    end = words.index("--") if "--" in words else len(words)
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [str(image.environment / "bin" / "nereid"), *words[:end], *ours, *words[end:]],
            cwd=image.workspace.parent,
            env=image.variables | variables,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        ready = process.stdout.readline()
        watchdog.cancel()
        assert ready, log.read_text()[-3000:]
        yield process, json.loads(ready)
    finally:
        watchdog.cancel()
        process.terminate()
        process.communicate(timeout=STOP_S)


def test_installed_server_classifies_and_ends(image, tmp_path):
    key = key_changes.add(tmp_path / "keys.json", "me", ["infer"], None)
    words = json.loads(*instructions(SLIM, "CMD"))
    with started(image, words, tmp_path / "log") as (process, ports):
        # The first probes come after the start.
        wait_until(lambda: image.check(ports["health"]) == (0, ""), "healthy")
        words = ["classify", str(COFFEE), "--json", "--url", f"127.0.0.1:{ports['grpc']}"]
        done = image.run(str(image.environment / "bin" / "nereid"), *words, NEREID_KEY=key)
        process.send_signal(signal.SIGTERM)
        code = process.wait(STOP_S)

    (answer,) = json.loads(done.stdout)
    assert (answer["labels"][0]["name"], code) == ("espresso", 0)


def test_image_is_small_and_has_a_gateway(image):
    """Installed and copied files leave room for the base image below the promised size."""
    folders = image.environment, image.workspace
    paths = [path for folder in folders for path in folder.rglob("*") if not path.is_symlink()]

    assert sum(path.stat().st_blocks * 512 for path in paths) / 1e6 < MOST_MB - BASE_MB
    done = image.run(str(image.environment / "bin" / "python"), "-c", "import nereid.cli.gateway")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def triton(image, tmp_path_factory):
    """A Triton like that of NVIDIA's image, and the image that the other Dockerfile's script makes of it."""
    wheel, folder = find_installation({}), tmp_path_factory.mktemp("triton")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(wheel.backends / "python", folder / "backends" / "python", ignore=ignored)
    shutil.copy2(wheel.stub, folder / "backends" / "python")
    (folder / "bin").mkdir()
    (folder / "bin" / "tritonserver").symlink_to(wheel.server)
    made = Image(image.workspace, folder / "system")
    subprocess.run([sys.executable, "-m", "venv", made.environment], check=True, timeout=INSTALL_S)
    extras = SERVICES["triton-cpu"]["build"]["args"]["EXTRAS"]
    made.install("system", str(folder / "backends"), extras, python=str(made.environment / "bin" / "python"))
    yield folder, made
    shutil.rmtree(made.environment)


def test_image_of_nvidia_gets_only_backends_that_it_lacks(triton):
    folder, _ = triton
    ours = {path.parent.name: path for path in ADAPTERS.glob("*/model.py")}
    added = {path.name for path in (folder / "backends").iterdir()} - {"python"}

    assert added == ours.keys() - {"onnxruntime"}
    for name in added:
        assert (folder / "backends" / name / "model.py").read_bytes() == ours[name].read_bytes()


def test_command_of_compose_serves_with_another_triton(triton, tmp_path):
    folder, image = triton
    repository = shutil.copytree(image.workspace / "model_repository", tmp_path / "models")
    wheel = find_installation({})
    key_changes.add(tmp_path / "keys.json", "me", ["infer"], None)
    _, program, *words = command_line("triton-cpu")
    assert program == "nereid"
    with listening() as (collector, traces):
        places = {
            "=/data/models": f"={repository}",
            "http://jaeger:4318": collector,
            "rate=100": "rate=1",
            "--health-port=8003": "--health-port=0",
        }
        for theirs, ours in places.items():
            assert any(theirs in word for word in words), theirs
            words = [word.replace(theirs, ours) for word in words]
        variables = SERVICES["triton-cpu"]["environment"] | {
            "NEREID_TRITON": str(folder),
            "LD_LIBRARY_PATH": str(wheel.libraries),
        }
        with started(image, words, tmp_path / "log", **variables) as (process, ports):
            wait_until(lambda: any(b"triton" in each and b"classify" in each for each in traces), "a trace")
            (server,) = (
                each for each in psutil.Process(process.pid).children() if each.name() == "tritonserver"
            )
            (route, *_) = (
                each for each in stub_processes.find(server.pid, repository) if each.model == "classify"
            )
            os.kill(route.process.pid, signal.SIGKILL)
            wait_until(lambda: image.check(ports["health"])[0] == 1, "not ready")
            wait_until(lambda: image.check(ports["health"])[0] == 0, "ready again")
