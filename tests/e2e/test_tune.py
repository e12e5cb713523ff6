"""`nereid tune` on the real server: effects of settings, and the written profile."""

import os
import signal
import time
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from loadtest.servers import served
from nereid.base import prometheus_text
from nereid.base.assets import COFFEE, REPOSITORY
from nereid.base.prometheus_text import MetricSamples
from nereid.insight.tune import profiles, search
from nereid.insight.tune.profiles import DELAY, INSTANCES, MAX_BATCH_SIZE, PREFERRED, with_settings
from nereid.insight.tune.search import FIRST_ROUND_S, NotMeasured, Objective, Search
from nereid.insight.tune.trial import TrialServer, copy_repository
from nereid.insight.tune.tuning import TuneOptions, TuneReport, write
from nereid.repository import check
from nereid.server.model_control import ModelControl
from nereid.tasks.classify.client import Classifier
from tests.detectors import add_detector
from tests.routes import WATCHDOG_S, wait_until
from tests.tables import rows
from tests.tasks import add_reader

pytestmark = pytest.mark.nightly(minutes=4)

VARIANTS = ("classify_v1", "classify_v2")
NETWORK = "efficientnet_lite0"
# Eight callers wait for a batch of sixteen, so any other setting gains more than the noise.
CALLERS = 8
WAITING = {DELAY: 400_000, PREFERRED: 16, MAX_BATCH_SIZE: 16}
# Longer than the interval at which stubs publish their metrics.
METRICS_S = 1.5
CHANGED = (("instances", 1), (DELAY, 500))


@pytest.fixture
def models(tmp_path):
    return copy_repository(REPOSITORY, tmp_path / "models")


def read_json(url: str, path: str) -> dict:
    return httpx.get(f"http://{url}{path}", timeout=WATCHDOG_S).json()


def assert_served_as_fused(repository, folder, instances: int) -> None:
    """Serve profile `tuned`: both variants are fused, classify_v1 in `instances`, and the route responds.

    The other model has its config of `cpu`, since a server has one profile.
    """
    with served(folder, os.environ, "tuned", repository) as server:
        url = f"127.0.0.1:{server.options.ports.http}"
        configs = {model: read_json(url, f"/v2/models/{model}/config") for model in VARIANTS}
        with Classifier(url, "http") as classifier:
            answer = classifier.classify(COFFEE.read_bytes(), top_k=1)

    assert {model: config["backend"] for model, config in configs.items()} == dict.fromkeys(VARIANTS, "fused")
    assert configs["classify_v1"]["instance_group"][0]["count"] == instances
    assert answer.labels[0].name == "espresso"


@contextmanager
def trial(models, model, profile, folder, concurrencies=(8,), kind=TrialServer):
    (folder / "trial").mkdir()
    tuned = profiles.tunable(models, model, profile)
    with kind(models, tuned, (), concurrencies, folder / "trial", os.environ, float("inf")) as trying:
        yield trying


def test_settings_take_effect(models, tmp_path):
    settings = {"instances": 1, "intra_op_thread_count": 2, "max_batch_size": 2, "preferred_batch_size": 2}
    with trial(models, NETWORK, "ensemble", tmp_path) as trying:

        def largest_batch(*candidate: Any) -> int:
            load = trying.measure(candidate, 0.5)[8]
            assert load.answered > 0
            assert load.failed == 0
            path = f"/v2/models/{NETWORK}/versions/2/stats"
            (stats,) = read_json(f"127.0.0.1:{trying.server.options.ports.http}", path)["model_stats"]
            return max(batch["batch_size"] for batch in stats["batch_stats"])

        # A busy machine may send the requests one after the other.
        wait_until(lambda: largest_batch() > 2, "a batch of more than two")
        assert largest_batch(*settings.items()) == 2
        log = trying.server.log.tail()

    assert f"'{NETWORK}' version 2: ONNX Runtime" in log
    assert "2 thread(s) per instance" in log
    assert not list(models.rglob("tuned.pbtxt"))


def test_fused_model_has_settings_of_its_own_for_its_network(models, tmp_path):
    settings = {"instances": 1, "intra_op_thread_count": 2, "run_batch_size": 4}
    with trial(models, "classify_v1", "cpu", tmp_path) as trying:
        load = trying.measure(tuple(settings.items()), 0.5)[8]
        time.sleep(METRICS_S)
        page = prometheus_text.fetch(f"127.0.0.1:{trying.server.options.ports.metrics}", 10)
        log = trying.server.log.tail()

    assert (load.failed, load.answered > 0) == (0, True)
    assert "2 thread(s) per instance" in log
    runs = MetricSamples.parse(page).buckets("nereid_onnxruntime_batch_size", "model")["classify_v1",]
    assert runs[4] > 0 == sum(count for bound, count in runs.items() if bound > 4)


@rows(
    (add_detector, "cars_v1", "cpu"),
    (add_detector, "cars_boxes", "ensemble"),
    (add_reader, "read_text_v1", "cpu"),
    (add_reader, "text_detect", "ensemble"),
)
def test_settings_of_detectors_and_readers_are_measured(add, model, profile, tmp_path):
    """Their requests have one image; every kind of model answers all, also with other settings."""
    with trial(add(tmp_path), model, profile, tmp_path, (1, 4)) as trying:
        measured = [trying.measure(candidate, 0.2) for candidate in ((), CHANGED)]

    loads = [load for result in measured for load in result.values()]
    assert [(load.answered > 0, load.failed) for load in loads] == [(True, 0)] * 4


class Breaking(TrialServer):
    """A server with an accident before or after it returns the config of a candidate."""

    before = after = staticmethod(lambda: None)

    def served_config(self):
        self.before()
        config = super().served_config()
        self.after()
        return config


def test_candidate_that_breaks_the_server_costs_only_itself(models, tmp_path):
    reasons = []
    with trial(models, "classify_v1", "cpu", tmp_path, (2,), Breaking) as trying:
        model_control = ModelControl(trying.server.info())

        def stop():
            process = psutil.Process(trying.server.pid)
            process.suspend()
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED)

        accidents = [
            ("before", lambda: model_control.unload("classify_v1")),
            ("after", lambda: os.kill(trying.server.pid, signal.SIGKILL)),
            ("before", stop),
        ]
        for when, breaks in accidents:
            setattr(trying, when, breaks)
            with pytest.raises(NotMeasured) as error:
                trying.measure((("instances", 1),), 0.2)
            reasons.append(str(error.value))
            delattr(trying, when)
            assert trying.measure((), 0.2)[2].failed == 0

    gone, dead, hanging = reasons
    assert "classify_v1" in gone
    assert dead.startswith("at concurrency 2, 0 requests were answered")
    assert "does not respond" in hanging


def test_bad_config_is_replaced(models, tmp_path):
    path = models / "classify_v1" / "configs" / "cpu.pbtxt"
    path.write_text(with_settings(path.read_text(), WAITING))
    tuned = profiles.tunable(models, "classify_v1", "cpu")
    with trial(models, "classify_v1", "cpu", tmp_path, (CALLERS,)) as trying:
        config = trying.served_config()
        grid = search.space(config, "fused", cores=2)
        points, default = list(search.points(grid, 2)), search.settings_of(grid, config)
        spent = [0.0]

        def measure(candidate, seconds):
            """Measure by a clock that counts only the load, so that any machine runs the same rounds."""
            spent[0] += seconds
            return trying.measure(candidate, seconds)

        searching = Search(measure, Objective("throughput"), 1, lambda: spent[0], 14 * FIRST_ROUND_S)
        result = searching.run(search.sample(points, grid, search.MAX_CANDIDATES, 0, without=default))
    report = TuneReport(
        "classify_v1", searching.objective, default, *result, searching.seen, searching.failures
    )

    found_waits = dict(report.best)[DELAY] == WAITING[DELAY] and dict(report.best)[PREFERRED] > CALLERS
    assert not found_waits, report.reason()
    options = TuneOptions(models, "classify_v1", "cpu")
    assert write(options, tuned, report, print) == list(VARIANTS)
    assert not [finding for finding in check.check(models) if finding.verdict == "fail"]
    assert_served_as_fused(models, tmp_path, dict(report.best)[INSTANCES])
