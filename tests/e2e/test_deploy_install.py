"""Installation of the images: their files, script and command in a clean environment."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from nereid.assets import ADAPTERS, COFFEE
from nereid.gateway.admission import key_changes
from nereid.server.command_line import environment, region_prefix
from nereid.server.ports import free_ports
from nereid.server.wheel import find_wheel
from nereid.triton import stub_processes
from tests.conftest import ROOT
from tests.deployment import SERVICES, SLIM, check_health, command_line, copies, instructions, listening
from tests.routes import wait_until
from tests.supervised import ANY_PORTS

# What the slim image may take, and what python:3.12-slim-bookworm takes of it, in MB, generously.
MOST_MB, BASE_MB = 900, 150
INSTALL_S, START_S, STOP_S = 900, 180, 90

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Image:
    """The content of an image: a part of the checkout, and the environment."""

    workspace: Path
    environment: Path

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the image, and none of this test's own Python."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))
        }
        path = f"{self.environment / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        return kept | {"PATH": path, "XDG_RUNTIME_DIR": str(self.workspace.parent)}

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess:
        """Run a command to its end, outside the checkout."""
        return subprocess.run(
            words,
            cwd=self.workspace.parent,
            env=self.variables | variables,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
        )

    def install(self, *words: str, python: str) -> None:
        """Run the script that the Dockerfiles run."""
        done = self.run(str(self.workspace / "deploy" / "install.sh"), *words, PYTHON=python)
        assert done.returncode == 0, done.stderr[-3000:]

    def check(self, port: int) -> tuple[int, str]:
        """Run its health check on a server of the loopback; returns its exit code and output."""
        return check_health("--url", f"http://127.0.0.1:{port}", workspace=self.workspace)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """Copy the files of the Dockerfile, and run its script with its arguments."""
    folder = tmp_path_factory.mktemp("image")
    image = Image(folder / "workspace", folder / "nereid")
    for source, target in copies(SLIM):
        place = image.workspace / target.removeprefix("/workspace/")
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            place = place / Path(source).name if target.endswith("/") else place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / source, place)
    (extras,) = (each.partition("=")[2] for each in instructions(SLIM, "ARG") if each.startswith("EXTRAS="))
    (run,) = (each.split() for each in instructions(SLIM, "RUN") if each.startswith("deploy/install.sh "))
    places = {"/opt/nereid": str(image.environment), '"${EXTRAS}"': extras}
    image.install(*[places.get(word, word) for word in run[1:]], python=sys.executable)
    yield image
    shutil.rmtree(image.environment)


@contextmanager
def started(image: Image, log: Path):
    """Run the image's command on free ports of the loopback until it is ready; yields process and ports.

    Its keys are in `keys.json`, in the folder of the log.
    """
    words = [word for name in ("ENTRYPOINT", "CMD") for word in json.loads(*instructions(SLIM, name))]
    keys = log.with_name("keys.json")
    words += [*ANY_PORTS, "--host", "127.0.0.1", "--require-keys", "--keys", str(keys), "--drain-s", "0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [str(image.environment / "bin" / words[0]), *words[1:]],
            cwd=image.workspace.parent,
            env=image.variables,
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
    """The image's command serves its repository, guarded; it is healthy, and SIGTERM ends it with 0."""
    key = key_changes.add(tmp_path / "keys.json", "me", ["infer"], None)
    with started(image, tmp_path / "log") as (process, ports):
        page = f"http://127.0.0.1:{ports['health']}/readyz"
        # The first probes come after the start.
        wait_until(lambda: check_health("--page", page, workspace=image.workspace) == (0, ""), "healthy")
        words = ["classify", str(COFFEE), "--json", "--url", f"127.0.0.1:{ports['grpc']}"]
        done = image.run(str(image.environment / "bin" / "nereid"), *words, NEREID_KEY=key)
        process.send_signal(signal.SIGTERM)
        code = process.wait(STOP_S)

    (answer,) = json.loads(done.stdout)
    assert (answer["labels"][0]["name"], code) == ("espresso", 0)


def test_image_has_a_gateway(image):
    """The same image can be the gateway."""
    done = image.run(str(image.environment / "bin" / "python"), "-c", "import nereid.cli.gateway")

    assert (done.returncode, done.stderr) == (0, "")


def test_image_stays_small(image):
    """Installed and copied files leave room for the base image below the promised size."""
    folders = image.environment, image.workspace
    paths = [path for folder in folders for path in folder.rglob("*") if not path.is_symlink()]

    size_mb = sum(path.stat().st_blocks * 512 for path in paths) / 1e6

    assert size_mb < MOST_MB - BASE_MB


@pytest.fixture
def backends(image, tmp_path):
    """Install as the other Dockerfile does, in a folder with Triton's own Python backend."""
    wheel, folder = find_wheel(), tmp_path / "backends"
    shutil.copytree(wheel.python_backend, folder / "python", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(wheel.stub, folder / "python")
    image.install("system", str(folder), "cpu", python=str(image.environment / "bin" / "python"))
    return folder


@contextmanager
def composes_server(image: Image, backends: Path, collector: str, log: Path):
    """Run the real `tritonserver` as Compose runs `triton-cpu`; yields its pid and HTTP port."""
    name, ports = f"compose-{os.getpid()}", free_ports(3)
    places = {
        "=/models": f"={image.workspace / 'model_repository'}",
        "=/opt/tritonserver/backends": f"={backends}",
        "=0.0.0.0": "=127.0.0.1",
        "http://jaeger:4318": collector,
        "rate=100": "rate=1",
        **{f"port=800{index}": f"port={port}" for index, port in enumerate(ports)},
    }
    _, program, *flags = command_line("triton-cpu")
    assert program == "tritonserver"
    for theirs, ours in places.items():
        assert any(theirs in flag for flag in flags), theirs
        flags = [flag.replace(theirs, ours) for flag in flags]
    # So that nothing of the stub that is killed stays here; a container's shared memory ends with it.
    flags.append(f"--backend-config=python,shm-region-prefix-name={region_prefix(name)}")
    wheel = find_wheel()
    variables = environment(wheel, image.variables | SERVICES["triton-cpu"]["environment"])
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(wheel.server), *flags],
            cwd=log.parent,
            env=variables | {"PATH": image.variables["PATH"]},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_until(lambda: image.check(ports[0]) == (0, "") or process.poll() is not None, "healthy", START_S)
        assert process.poll() is None, log.read_text()[-3000:]
        yield process.pid, ports[0]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for region in Path("/dev/shm").glob(f"{region_prefix(name)}*"):
            region.unlink()


def test_real_server_takes_what_compose_tells_it(image, backends, tmp_path):
    """The server is healthy, exports traces, and becomes unhealthy when the route's process dies."""
    ours = {path.parent.name: path for path in ADAPTERS.glob("*/model.py")}
    added = {path.name for path in backends.iterdir()} - {"python"}
    assert added == ours.keys() - {"onnxruntime"}, "one of that name would hide NVIDIA's"
    for name in added:
        assert (backends / name / "model.py").read_bytes() == ours[name].read_bytes()
    # NVIDIA's is not in the wheel.
    shutil.copytree(ours["onnxruntime"].parent, backends / "onnxruntime")

    with (
        listening() as (collector, traces),
        composes_server(image, backends, collector, tmp_path / "log") as (pid, port),
    ):
        wait_until(lambda: any(b"triton" in each and b"classify" in each for each in traces), "a trace")
        (route,) = (
            each
            for each in stub_processes.find(pid, image.workspace / "model_repository")
            if each.model == "classify"
        )
        os.kill(route.process.pid, signal.SIGKILL)
        code, said = image.check(port)

    assert (code, "not healthy" in said) == (1, True), said
