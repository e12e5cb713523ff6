"""Requests whose time is over when an instance gets to them, on the real server in both shapes."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from nereid import metrics_page
from nereid.assets import COFFEE
from tests.e2e.conftest import ESPRESSO, url
from tests.routes import wait_until

# Each test has a model of its own, so that it counts nothing of the other.
DIRECT, ROUTED = "classify_v2", "classify_v1"
CALLERS, TIMEOUT_US = 48, 60_000


@pytest.fixture
def client(server):
    with tritonclient.grpc.InferenceServerClient(url(server, "grpc")) as connected:
        yield connected


def best(client, model: str, **options) -> int:
    tensor = tritonclient.grpc.InferInput("image", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[COFFEE.read_bytes()]], dtype=object))
    return int(client.infer(model, [tensor], **options).as_numpy("scores").argmax())


def test_late_calls_of_a_route_leave_the_queue(both_profiles):
    """A request that no caller waits for is not computed, although the queue has no policy."""
    server = both_profiles["cpu"]

    def refused() -> float:
        ports = server.options.ports
        page = metrics_page.parse(metrics_page.fetch(f"{server.options.host}:{ports.metrics}", 10))
        wanted = {"model": ROUTED, "reason": "unavailable"}
        return sum(
            sample.value
            for sample in page
            if sample.name == "nereid_onnxruntime_rejected_total" and wanted.items() <= sample.labels.items()
        )

    def outcome(**options):
        try:
            return best(client, "classify", headers={"x-variant": "v1"}, **options)
        except InferenceServerException as error:
            return error.message()

    before = refused()
    with (
        tritonclient.grpc.InferenceServerClient(url(server, "grpc")) as client,
        ThreadPoolExecutor(CALLERS) as pool,
    ):

        def has_late_one() -> bool:
            outcomes = pool.map(lambda _: outcome(timeout=TIMEOUT_US), range(CALLERS))
            return any("deadline exceeded: " in str(each) for each in outcomes)

        # On a busy machine, a call may be late before it is in the queue.
        wait_until(lambda: has_late_one() and refused() > before)
        wait_until(lambda: outcome() == ESPRESSO)
