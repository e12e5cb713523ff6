"""docker-compose.yml in an engine of its own: for the trial and for its record.

The base images are stand-ins of the same names, which bases.sh makes. `nereid-triton` contains the Triton of
the wheel instead of NVIDIA's.
"""

import os
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nereid.base import assets
from nereid.client.client_errors import NereidError
from nereid.client.request import ProtocolName
from nereid.server.ports import free_ports
from nereid.tasks.classify.client import Classifier

TOOLS = Path(__file__).parent
CHECKOUT = TOOLS.parent.parent
MAKE_S = 900
UP_S = 600
COMMAND_S = 180
PAGE_S = 10
SERVICES = ("GATEWAY", "GATEWAY_GRPC", "PROMETHEUS", "ALERTMANAGER", "GRAFANA", "JAEGER", "LOCUST")
PORTS = tuple(f"{service}_PORT" for service in SERVICES)
# Names an engine that stays; otherwise each caller starts one, and deletes it.
KEPT = "CONTAINER_ENGINE"
PHOTO, LABEL = assets.COFFEE, "espresso"
PAUSE_S = 0.02
CALLERS: tuple[ProtocolName, ...] = ("http", "grpc", "http", "grpc")


class NoEngine(Exception):
    """No container engine can run on this machine; the message has the reason."""


class CommandFailed(Exception):
    """A command ended with another code than 0; the message has its output."""


@dataclass(frozen=True)
class Engine:
    """A running container engine: the variables that its programs need."""

    variables: dict[str, str]

    def run(
        self, *words: str, folder: Path = CHECKOUT, limit_s: float = COMMAND_S, may_fail: bool = False
    ) -> str:
        """Run a command to its end; returns its output.

        Raises:
            CommandFailed: its code is not 0.
        """
        done = subprocess.run(
            words, cwd=folder, env=self.variables, capture_output=True, text=True, timeout=limit_s
        )
        if done.returncode and not may_fail:
            raise CommandFailed(f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return done.stdout


@dataclass(frozen=True)
class Project:
    """A checkout whose services run with a profile."""

    engine: Engine
    folder: Path

    def compose(self, *words: str, limit_s: float = COMMAND_S, may_fail: bool = False) -> str:
        """Run `docker compose` with these words; returns its output."""
        command = ("docker", "compose", *words)
        return self.engine.run(*command, folder=self.folder, limit_s=limit_s, may_fail=may_fail)

    def up(self, *words: str) -> None:
        """Start all services, with these options of `docker compose up`, and wait until they are healthy.

        Raises:
            CommandFailed: the message has the end of the services' logs.
        """
        try:
            self.compose("up", "--wait", *words, limit_s=UP_S)
        except CommandFailed as error:
            logs = self.compose("logs", "--tail", "30", may_fail=True)
            raise CommandFailed(f"{error}\n{logs[-6000:]}") from None

    @property
    def key(self) -> str:
        """The first key, as the log of `init` says."""
        command = self.compose("logs", "--no-log-prefix", "init").rpartition("first key: ")[2].splitlines()[0]
        return self.engine.run(*command.split(), folder=self.folder).strip()

    def url(self, protocol: ProtocolName) -> str:
        """Return HOST:PORT of the gateway, or of the proxy."""
        name = {"http": "GATEWAY_PORT", "grpc": "GATEWAY_GRPC_PORT"}[protocol]
        return f"127.0.0.1:{self.engine.variables[name]}"

    def is_ready(self) -> bool:
        """Return whether the server behind the gateway is ready."""
        try:
            with urllib.request.urlopen(f"http://{self.url('http')}/readyz", timeout=PAGE_S) as page:
                return bool(page.status == 200)
        except OSError:
            return False

    def nereid(self, *words: str) -> str:
        """Run a command next to the server, as docs/containers.md says."""
        return self.compose("exec", "-T", "publisher", "nereid", *words)

    def pids(self, service: str, words: str) -> list[int]:
        """Return the processes of a service whose command line contains the words, by their numbers here."""
        container = self.compose("ps", "--quiet", service).strip()
        # Without `ww`, lines end after COLUMNS characters.
        lines = self.engine.run("docker", "top", container, "ww", "-eo", "pid,args").splitlines()
        return [int(line.split()[0]) for line in lines if words in line]


@contextmanager
def engine() -> Iterator[Engine]:
    """Run an engine with the base images, on ports and in a project of its own.

    Raises:
        NoEngine: none starts on this machine.
    """
    kept = os.environ.get(KEPT, "")
    folder = kept or f"/tmp/nereid-engine-{os.getpid()}"
    variables = {**os.environ, KEPT: folder}
    start = subprocess.run(
        [TOOLS / "engine.sh", "start"], env=variables, capture_output=True, text=True, timeout=MAKE_S
    )
    try:
        if start.returncode:
            raise NoEngine(start.stderr[-300:])
        line = start.stdout.strip().removeprefix("export ").replace("$PATH", os.environ["PATH"])
        variables |= dict(word.split("=", 1) for word in line.split(" "))
        variables |= dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
        running = Engine(variables | {"COMPOSE_PROJECT_NAME": f"nereid{os.getpid()}"})
        running.run(str(TOOLS / "bases.sh"), str(CHECKOUT), limit_s=MAKE_S)
        yield running
    finally:
        if not kept:
            subprocess.run([TOOLS / "engine.sh", "stop"], env=variables, capture_output=True, timeout=MAKE_S)


def copy_checkout(target: Path) -> Path:
    """Copy the checkout without anything that git ignores, as a fresh clone has it."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=CHECKOUT, text=True)
    for name in filter(lambda path: (CHECKOUT / path).exists(), listed.splitlines()):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, target / name)
    return target


@contextmanager
def project(running: Engine, folder: Path, *profiles: str) -> Iterator[Project]:
    """Yield a project with nothing prepared; remove its containers and volumes afterwards."""
    profile = {"COMPOSE_PROFILES": ",".join(profiles)} if profiles else {}
    checkout = Project(Engine(running.variables | profile), folder)
    try:
        yield checkout
    finally:
        checkout.compose("--profile", "*", "down", "--volumes", "--timeout", "1", may_fail=True)


@dataclass(frozen=True, slots=True)
class Failure:
    """An outcome other than espresso; the times are of time.monotonic()."""

    reason: str
    sent_s: float
    ended_s: float


class Load:
    """Two callers over each protocol that retry, and their failures."""

    def __init__(self, project: Project) -> None:
        self.failures: list[Failure] = []
        self.answered = 0
        self._right = [0] * len(CALLERS)
        self._over = threading.Event()
        key = project.key
        self._threads = [
            threading.Thread(target=self._send, args=(number, project.url(protocol), protocol, key))
            for number, protocol in enumerate(CALLERS)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        self.wait_answers()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def wait_answers(self, count: int = 20) -> None:
        """Wait for further answers, right or wrong, of all callers together.

        Raises:
            TimeoutError: they do not come.
        """
        target = self.answered + count
        self._wait(lambda: self.answered >= target, f"{count} answers")

    def wait_right_answers(self, count: int) -> None:
        """Wait until each caller has further right answers.

        A gRPC caller may reconnect only a second after the server is back, and fails until then.

        Raises:
            TimeoutError: they do not come.
        """
        targets = [right + count for right in self._right]

        def have_all() -> bool:
            return all(right >= least for right, least in zip(self._right, targets, strict=True))

        self._wait(have_all, f"{count} right answers to each caller")

    def _wait(self, is_over: Callable[[], bool], description: str) -> None:
        end_s = time.monotonic() + COMMAND_S
        while not is_over():
            if time.monotonic() > end_s:
                raise TimeoutError(f"no {description}; failures: {self.failures[-5:]}")
            time.sleep(0.1)

    def _send(self, number: int, url: str, protocol: ProtocolName, key: str) -> None:
        with Classifier(url, protocol, api_key=key) as classifier:
            while not self._over.is_set():
                sent_s = time.monotonic()
                try:
                    got = classifier.classify(PHOTO, top_k=1).labels[0].name
                except NereidError as error:
                    got = f"{type(error).__name__}: {error}"
                if got == LABEL:
                    self._right[number] += 1
                else:
                    self.failures.append(Failure(f"{protocol} {got}", sent_s, time.monotonic()))
                self.answered += 1
                time.sleep(PAUSE_S)
