"""Runs that fail with a broken device."""

from collections import Counter

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.faulty_networks import FRAGILE_IO, ILLEGAL_ACCESS, fragile
from tests.networks import client_input, store
from tests.routes import wait_until
from tests.supervised import Served, serving

TWO_INSTANCES = "instance_group { kind: KIND_CPU count: 2 }\n"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    base = tmp_path_factory.mktemp("failed_runs")
    store(base / "repository", "fragile", fragile(), FRAGILE_IO + TWO_INSTANCES)
    with serving(base / "repository", base / "run") as running:
        yield running


def infer(served: Served, *shape: int) -> np.ndarray:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{served.ports['grpc']}") as client:
        return client.infer("fragile", [client_input("grpc", "shape", np.array(shape))]).as_numpy("y")


def outcome(served: Served) -> str:
    try:
        answer = infer(served, 2, 2)
    except InferenceServerException as error:
        return str(error.message())
    return "right" if answer.tolist() == [[1, 1], [1, 1]] else f"wrong: {answer}"


def test_instance_with_a_broken_device_is_replaced(served):
    before = {stub.process for stub in served.stubs("fragile")}

    with pytest.raises(InferenceServerException) as raised:
        infer(served, 3, 3)
    texts: Counter[str] = Counter()

    def is_repaired() -> bool:
        texts[outcome(served)[:27]] += 1
        return served.metric("repairs_total", model="fragile", cause="device") == 1

    wait_until(is_repaired, "repair")

    # Half of the processes still answer, and none of the others hangs.
    assert texts.keys() <= {"right", "unavailable: device failed:"}

    assert raised.value.message().startswith("unavailable: device failed: onnx runtime error 1: ")
    assert ILLEGAL_ACCESS in raised.value.message()
    assert infer(served, 2, 2).shape == (2, 2)
    wait_until(lambda: not before & {stub.process for stub in served.stubs("fragile")}, "new processes")
    assert "supervisor: model 'fragile' version 1 had a failed device" in served.log
    assert served.triton_metric("nereid_onnxruntime_device_failures_total", model="fragile") == 1
