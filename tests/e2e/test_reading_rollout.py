"""Two recognisers behind one route under load: publish, shadow, shares, rollback; no request fails."""

import json
import os
import shutil
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from nereid import Reader
from nereid.assets import TEXT_REPOSITORY
from nereid.metrics_page import parse
from tests.labels import LABEL, WORDS
from tests.recognisers import retrained
from tests.routes import WATCHDOG_S, wait_until
from tests.supervised import NEREID, Served, serving

pytest.importorskip("cv2", reason="opencv is not installed: extra text")
pytestmark = pytest.mark.slow
CALLERS = 3


class Readers:
    """Callers that read the same label until the context ends; keeps the variants and the failures."""

    def __init__(self, served: Served) -> None:
        self.variants: Counter[str] = Counter()
        self.failures: list[str] = []
        self._served, self._is_over = served, threading.Event()
        self._pool = ThreadPoolExecutor(CALLERS)

    def __enter__(self) -> "Readers":
        protocols = ("http", "grpc", "http")
        self._calls = [self._pool.submit(self._read, protocol) for protocol in protocols]
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_over.set()
        for call in self._calls:
            call.result()

    def _read(self, protocol) -> None:
        with Reader(f"127.0.0.1:{self._served.ports[protocol]}", protocol) as reader:
            while not self._is_over.is_set():
                try:
                    found = reader.read(LABEL)
                except Exception as error:  # counted, and reported at the end
                    self.failures.append(repr(error))
                    continue
                if [line.text for line in found.lines] != WORDS:
                    self.failures.append(f"{found.variant}: {[line.text for line in found.lines]}")
                self.variants[found.variant] += 1


def test_recognisers_change_under_load(tmp_path):
    """The second recogniser is published, shadows, gets half of the traffic, and is rolled back."""
    repository = tmp_path / "models"
    shutil.copytree(TEXT_REPOSITORY, repository, ignore=shutil.ignore_patterns("read_waybill*"))
    new = retrained(tmp_path / "new.onnx")
    with serving(repository, tmp_path / "run") as served, Readers(served) as readers:

        def nereid(*words: str) -> str:
            line = [NEREID, *words, "--repository", str(repository)]
            environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path / "run")}
            done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=WATCHDOG_S)
            assert done.returncode == 0, done.stderr
            return done.stdout

        def answers(variant: str) -> int:
            return readers.variants[variant]

        def agreed() -> float:
            samples = parse(served.triton_page())
            return sum(
                each.value
                for each in samples
                if each.name == "nereid_route_shadow_requests_total" and each.labels["outcome"] == "agreed"
            )

        nereid("publish", "read_text", str(new), "--accept-change", "--max-slowdown", "10")
        route = json.loads((repository / "read_text.route.json").read_text())
        (model,) = (each["model"] for each in route["variants"] if each["name"] != "v1")
        shadow = {"name": "next", "model": model, "version": 1, "percent": 100}
        mirrored = route | {"shadows": [shadow], "shadow_max_in_flight": 16}
        (tmp_path / "route.json").write_text(json.dumps(mirrored))
        nereid("route", "set", "--file", str(tmp_path / "route.json"))
        wait_until(lambda: agreed() >= 3, "a shadow that agrees")
        nereid("route", "set", "v1=50", "v2=50")
        wait_until(lambda: answers("v2") >= 3, "answers of the second recogniser")
        nereid("rollback", "read_text")
        after, old = answers("v2"), answers("v1")
        wait_until(lambda: answers("v1") >= old + 5, "answers after the rollback")

        assert answers("v2") <= after + CALLERS
        assert readers.failures == []
