"""The time from the start of a server's process to its first responses."""

import time
from collections.abc import Mapping
from pathlib import Path

from loadtest.record import Row, spread
from nereid.server.command_line import PLAIN_PROFILE, ServerOptions
from nereid.server.embedded_server import EmbeddedServer
from nereid.server.ports import Ports, free_ports

PROFILES = ("cpu", PLAIN_PROFILE)
MODEL = "classify_v1"
POLL_S, LIMIT_S = 0.02, 60.0


def measure(folder: Path, environment: Mapping[str, str], rounds: int) -> dict[str, Row]:
    """Start each profile in turn; returns seconds until the first and until all models respond."""
    found: dict[str, list[tuple[float, float]]] = {profile: [] for profile in PROFILES}
    for number in range(rounds):
        for profile, times in found.items():
            run_dir = folder / f"cold-{profile}-{number}"
            run_dir.mkdir()
            times.append(_start(profile, run_dir, environment))
    names = ("first_answer_s", "every_model_s")
    return {
        profile: dict(zip(names, map(spread, zip(*times, strict=True)), strict=True))
        for profile, times in found.items()
    }


def _start(profile: str, run_dir: Path, environment: Mapping[str, str]) -> tuple[float, float]:
    options = ServerOptions(profile=profile, ports=Ports(*free_ports(3)))
    server = EmbeddedServer(options, run_dir, environment)
    began = time.perf_counter()
    try:
        server.start()
        while time.perf_counter() - began < LIMIT_S and server.poll() is None:
            if server.probe(MODEL, timeout_s=LIMIT_S) is None:
                break
            time.sleep(POLL_S)
        first = time.perf_counter()
        server.wait_ready()
        return first - began, time.perf_counter() - began
    finally:
        server.stop()
