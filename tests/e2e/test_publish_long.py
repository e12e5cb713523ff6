"""Publishing under load, a publisher that is killed once, and a network from file to served scores."""

import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from nereid.assets import SAMPLES
from nereid.client.classifier import Classifier
from nereid.config.model_config import ModelConfig
from nereid.imaging.pipeline import Pipeline
from nereid.publish.add import AddRequest, add
from nereid.publish.publisher import retire, rollback
from nereid.repository.layout import versions_there
from nereid.routes.change import Superseded, change, reweighted
from nereid.routes.served import RunningServer
from nereid.routes.target import find_route
from nereid.server import run_dir
from nereid.server.run_dir import ServerRecord
from tests.e2e.conftest import group_members
from tests.networks import infer, run
from tests.proof import IS_PROOF
from tests.publishing import (
    CLASSES,
    NET,
    ROUTE,
    candidate,
    classifier,
    publish_number,
    record_of,
    store_published,
)
from tests.routes import Load, RouteResponse, serve_routes

pytestmark = pytest.mark.slow
# `make proof` runs 100 cycles; CI runs five.
CYCLES = 100 if IS_PROOF else 5
CALLERS = 8
SETTLED = 10
GROWTH = 1.10


@pytest.fixture
def served(tmp_path):
    repository = tmp_path / "models"
    store_published(repository)
    with serve_routes(repository, tmp_path) as running:
        yield running


def memory_bytes(leader: int) -> int:
    """Return the memory of a process group, its shared pages counted once."""
    pages = (Path(f"/proc/{pid}/smaps_rollup") for pid in group_members(leader))
    texts = (page.read_text() for page in pages if page.exists())
    return sum(int(kb) * 1024 for text in texts for kb in re.findall(r"^Pss: +(\d+) kB", text, re.M))


def is_right(answer: RouteResponse | Exception) -> bool:
    return isinstance(answer, RouteResponse) and answer.added == float(answer.origin[1])


def test_publishing_and_rolling_back_under_load_loses_nothing(served, tmp_path):
    record, repository, memory = record_of(served.server), served.repository, []

    with Load(served, ROUTE, CALLERS) as load, fidgeting(repository, record):
        for number in range(2, CYCLES + 2):
            done = publish_number(repository, tmp_path, record, number, share=0.5)
            load.wait_for(lambda o, n=number: isinstance(o.answer, RouteResponse) and o.answer.added == n)
            rollback(repository, NET, record)
            retire(repository, NET, done.version, record)
            memory.append(memory_bytes(served.server.pid))

    wrong = [outcome.answer for outcome in load.outcomes if not is_right(outcome.answer)]
    assert wrong == []
    assert {outcome.answer.origin[0] for outcome in load.outcomes} >= {f"v{n}" for n in range(1, CYCLES + 2)}
    assert versions_there(repository / NET) == [1]
    if CYCLES > 2 * SETTLED:
        assert np.median(memory[-SETTLED:]) <= GROWTH * np.median(memory[SETTLED : 2 * SETTLED])


@contextmanager
def fidgeting(repository: Path, record: ServerRecord) -> Iterator[None]:
    """Change the weight of variant `v1` continually, as another operator might."""
    is_over = threading.Event()

    def change_on() -> None:
        for weight in itertools.cycle((100, 101)):
            with suppress(Superseded):  # by the publisher
                change(find_route(repository, ROUTE), reweighted({"v1": weight}), RunningServer(record))
            if is_over.wait(0.2):
                return

    thread = threading.Thread(target=change_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def killed_after(line: str, command: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Run a command, and kill it once its progress has a line that begins like this."""
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert any(each.startswith(line) for each in process.stderr), "it ended before"
        process.kill()
    yield


def test_killed_publisher_is_completed_under_load(served, tmp_path):
    """The next command completes a publication that was killed after its first step; no request fails."""
    record, repository = record_of(served.server), served.repository
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "NEREID_REPOSITORY": str(repository)}
    words = ["publish", NET, str(candidate(tmp_path, 2)), "--accept-change", "--max-slowdown", "100"]
    with run_dir.occupy(run_dir.root(environment), repository) as folder, Load(served, ROUTE, 2) as load:
        run_dir.write(folder, record)
        command = [sys.executable, "-m", "nereid", *words]
        with killed_after(f"{NET}/2: added", command, environment):
            assert versions_there(repository / NET) == [1, 2]

        assert publish_number(repository, tmp_path, record, 3).version == 3
        assert [served.send(ROUTE, headers={"x-variant": f"v{n}"}).added for n in (1, 2, 3)] == [1, 2, 3]

    assert [outcome.answer for outcome in load.outcomes if not is_right(outcome.answer)] == []


@pytest.mark.parametrize("profile", ["ensemble", "cpu"])
def test_network_is_served_with_one_command(tmp_path, profile):
    repository, file = tmp_path / "models", tmp_path / "small.onnx"
    store_published(repository)
    onnx.save(classifier(), file)
    labels = tmp_path / "labels.txt"
    labels.write_text("".join(f"class {number}\n" for number in range(CLASSES)))
    flags = [] if profile == "ensemble" else [f"--model-config-name={profile}"]

    with serve_routes(repository, tmp_path, *flags) as served:
        record = replace(record_of(served.server), profile=profile)
        add(repository, AddRequest(file, "small", {"preset": "imagenet"}, labels), record)

        image = np.array([[SAMPLES[0].read_bytes()]], np.object_)
        (scores,) = infer(served.server, "small", {"image": image}, outputs=["scores"])["scores"]
        with Classifier(record.url("grpc"), "grpc", "small") as client:
            best = client.classify(SAMPLES[0], top_k=1)

    pipeline = Pipeline.from_config(ModelConfig.from_file(repository / "small_preprocess", 1))
    tensor = pipeline.run([[SAMPLES[0].read_bytes()]]).tensor.copy()
    found = run(repository / "small_network" / "1" / "model.onnx", {"images": tensor})
    expected = found["probabilities"][0]
    # Another thread count adds up in another order.
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-6)
    assert best.labels[0].name == f"class {expected.argmax()}"
    assert (best.variant, best.version) == ("v1", "1")
