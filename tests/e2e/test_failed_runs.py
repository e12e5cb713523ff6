"""Runs that fail for lack of memory or with a broken device, in a supervised server under load."""

import json
import resource
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.faulty_networks import (
    FRAGILE_IO,
    ILLEGAL_ACCESS,
    MEBIBYTE,
    WIDE_IO,
    fragile,
    fragile_scores,
    wide,
)
from tests.networks import ONE_INSTANCE, store
from tests.routes import NETWORK, document, serve_routes, store_router, variant, wait_until
from tests.supervised import Served, serving

ROWS, ROW_MEBIBYTES, CALLERS, REQUESTS = 8, 32, 4, 5
# Between the memory of a half with 64 MiB of the C library, and that of a batch: 192 and 256 MiB.
LIMIT_MEBIBYTES = 230
ONE_THREAD = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'
HALVES = 'parameters { key: "nereid.halve_batch_if_out_of_memory" value { string_value: "true" } }\n'
TWO_INSTANCES = "instance_group { kind: KIND_CPU count: 2 }\n"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of a network with large activations, and of one that can fail like a broken device."""
    base = tmp_path_factory.mktemp("failed_runs")
    config = f"max_batch_size: {ROWS}\n" + WIDE_IO + ONE_INSTANCE + ONE_THREAD
    store(base / "repository", "wide", wide(ROW_MEBIBYTES), config + HALVES)
    store(base / "repository", "fragile", fragile(), FRAGILE_IO + TWO_INSTANCES)
    with serving(base / "repository", base / "run") as running:
        yield running


def infer(served: Served, model: str, name: str, array: np.ndarray, datatype: str) -> np.ndarray:
    tensor = tritonclient.grpc.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{served.ports['grpc']}") as client:
        return client.infer(model, [tensor]).as_numpy("y")


def outcome(served: Served) -> str:
    """Send a good request to `fragile`; returns `right`, or the error."""
    try:
        answer = infer(served, "fragile", "shape", np.array([2, 2]), "INT64")
    except InferenceServerException as error:
        return str(error.message())
    return "right" if answer.tolist() == [[1, 1], [1, 1]] else f"wrong: {answer}"


def triton_metric(served: Served, beginning: str) -> float:
    lines = served.triton_page().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(beginning))


def test_batches_that_do_not_fit_are_answered(served):
    (stub,) = served.stubs("wide")
    infer(served, "wide", "x", np.ones((1, 1), np.float32), "FP32")
    pages = int(Path(f"/proc/{stub.process.pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + LIMIT_MEBIBYTES * MEBIBYTE
    resource.prlimit(stub.process.pid, resource.RLIMIT_AS, (limit, limit))

    def call(caller: int) -> bool:
        for number in range(REQUESTS):
            rows = np.arange(ROWS, dtype=np.float32).reshape(-1, 1) + 100 * caller + number
            if not np.array_equal(infer(served, "wide", "x", rows, "FP32"), rows):
                return False
        return True

    with ThreadPoolExecutor(CALLERS) as pool:
        assert all(pool.map(call, range(CALLERS)))
    counted = (
        'nereid_onnxruntime_fallbacks_total{from="batch",model="wide",reason="out_of_memory",to="halves"'
    )
    wait_until(lambda: triton_metric(served, counted) == CALLERS * REQUESTS, "count of halved batches")
    assert [each.process for each in served.stubs("wide")] == [stub.process]


def test_instance_with_a_broken_device_is_replaced(served):
    before = {each.process for each in served.stubs("fragile")}

    with pytest.raises(InferenceServerException) as raised:
        infer(served, "fragile", "shape", np.array([3, 3]), "INT64")
    texts: Counter[str] = Counter()

    def is_repaired() -> bool:
        texts[outcome(served)[:27]] += 1
        return served.metric("repairs_total", model="fragile", cause="device") == 1

    wait_until(is_repaired, "repair")

    # Half of the processes still answer, and none of the others hangs.
    assert texts.keys() <= {"right", "unavailable: device failed:"}

    assert raised.value.message().startswith("unavailable: device failed: onnx runtime error 1: ")
    assert ILLEGAL_ACCESS in raised.value.message()
    assert infer(served, "fragile", "shape", np.array([2, 2]), "INT64").shape == (2, 2)
    wait_until(lambda: not before & {each.process for each in served.stubs("fragile")}, "new processes")
    assert "supervisor: model 'fragile' version 1 had a failed device" in served.log
    assert triton_metric(served, 'nereid_onnxruntime_device_failures_total{model="fragile"') == 1


def test_route_uses_another_variant_than_one_with_a_broken_device(tmp_path):
    """Without a supervisor the device stays broken: every caller is served by the default variant."""
    repository = tmp_path / "repository"
    for name in ("broken", "sound"):
        store(repository, name, fragile_scores(), NETWORK)
        (repository / name / "labels.txt").write_text("a\nb\nc\n")
    store_router(repository, "route")
    variants = [variant("first", "broken", 100), variant("second", "sound", 0)]
    (repository / "route.route.json").write_text(json.dumps(document(*variants, default="second")))
    good, bad = np.array([[0, 3, 1]], np.float32), np.array([[0, 5, 1]], np.float32)
    with serve_routes(repository, tmp_path / "run") as served:
        assert served.send("route", x=good).variant == "first"
        with pytest.raises(InferenceServerException, match="unavailable: device failed: "):
            served.infer("broken", x=bad)

        answers = [served.send("route", x=good) for _ in range(20)]
        served.wait_metric(2, "breaker_state", variant="first")

    assert {each.variant for each in answers} == {"second"}
    assert all(each.scores.tolist() == good.tolist() for each in answers)
