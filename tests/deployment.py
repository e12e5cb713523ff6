"""Readers of docker-compose.yml and the Dockerfiles, their health check, and a server to post to."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests import http_receiver
from tests.commands import captured
from tests.conftest import ROOT
from tests.routes import wait_until

COMPOSE = ROOT / "docker-compose.yml"
SETTINGS = ROOT / ".env"
SLIM, NVIDIAS = "deploy/embedded.Dockerfile", "deploy/triton.Dockerfile"
INTERPOLATED = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", COMPOSE.read_text())
assert "${" not in INTERPOLATED, "every variable has a default"
DOCUMENT = yaml.safe_load(INTERPOLATED.replace("$$", "$"))
SERVICES = DOCUMENT["services"]


def command_line(service: str) -> list[str]:
    return [*SERVICES[service].get("entrypoint", ()), *SERVICES[service].get("command", ())]


def instructions(dockerfile: str, name: str) -> list[str]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / dockerfile).read_text(), flags=re.M).replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def copies(dockerfile: str) -> list[tuple[str, str]]:
    lines = [line.split() for line in instructions(dockerfile, "COPY") if not line.startswith("--from=")]
    return [(source, target) for *sources, target in lines for source in sources]


def check_health(*words: str) -> tuple[int, str]:
    """Run the health check without this environment's packages; returns its exit code and output."""
    program = [sys.executable, "-I", "-S", str(ROOT / "deploy" / "healthcheck.py"), *words]
    done = captured(program, timeout=60)
    assert done.stdout == ""
    return done.returncode, done.stderr


@contextmanager
def running(words: Sequence[str], log: Path, page: str, **options: Any) -> Iterator[subprocess.Popen]:
    """Run a program in the background; it is ready when it serves a page."""
    with log.open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, **{"cwd": ROOT, **options})

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(page).is_success
        except httpx.TransportError:
            return False

    try:
        wait_until(is_ready, words[0])
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def listening() -> Iterator[tuple[str, list[bytes]]]:
    """Run a server that responds to every POST with an empty object; yields its address and the bodies."""
    bodies: list[bytes] = []

    def answer(path: str, headers: Message, body: bytes) -> tuple[int, bytes]:
        bodies.append(body)
        return 200, b"{}"

    with http_receiver.receiving(answer) as address:
        yield f"http://{address}", bodies
