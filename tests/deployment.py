"""docker-compose.yml and the Dockerfiles, read; their health check, run; and a page for tests to post to."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import yaml

from tests.conftest import ROOT

COMPOSE = ROOT / "docker-compose.yml"
ENV_EXAMPLE = ROOT / ".env.example"
SLIM, NVIDIAS = "deploy/embedded.Dockerfile", "deploy/triton.Dockerfile"
TOKEN = "a-token-for-tests"


def interpolated(text: str) -> str:
    """Put in what Compose does where nothing is set but the token."""
    text = re.sub(r"\$\{NEREID_TOKEN:\?[^}]*\}", TOKEN, text)
    text = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)
    assert "${" not in text, "every other variable has a default"
    return text.replace("$$", "$")


DOCUMENT = yaml.safe_load(interpolated(COMPOSE.read_text()))
SERVICES = DOCUMENT["services"]


def command_line(service: str) -> list[str]:
    """Return what a service's container runs, as far as Compose says it."""
    return [*SERVICES[service].get("entrypoint", ()), *SERVICES[service].get("command", ())]


def instructions(dockerfile: str, name: str) -> list[str]:
    """Return the arguments of all instructions of a Dockerfile with that name, in their order."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / dockerfile).read_text(), flags=re.M).replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def copies(dockerfile: str) -> list[tuple[str, str]]:
    """Return what a Dockerfile copies from the checkout, and where to."""
    lines = [line.split() for line in instructions(dockerfile, "COPY") if not line.startswith("--from=")]
    return [(source, target) for *sources, target in lines for source in sources]


def check_health(*words: str, workspace: Path = ROOT) -> tuple[int, str]:
    """Run the health check without this environment's packages; returns its exit code and what it says."""
    program = [sys.executable, "-I", "-S", str(workspace / "deploy" / "healthcheck.py"), *words]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    return done.returncode, done.stderr


@contextmanager
def listening() -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers all that is posted with an empty object; gives its address and what came."""
    bodies: list[bytes] = []

    class Page(BaseHTTPRequestHandler):
        """What answers."""

        def do_POST(self) -> None:
            """Keep the body."""
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *about: object) -> None:
            """Say nothing on stderr."""

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()
            thread.join()
