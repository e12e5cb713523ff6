"""Blame: whatever a caller sends, no variant is blamed for it, and other callers are served."""

import struct
import time

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from nereid.base.assets import COFFEE
from nereid.tasks.classify.client import Classifier
from tests.e2e.conftest import ESPRESSO, url
from tests.routes import WATCHDOG_S
from tests.tables import cases

GOOD = COFFEE.read_bytes()
LENGTH = struct.Struct("<I")
# A breaker considers at least five requests to each of two variants.
ATTEMPTS = 30


def elements(*images: bytes) -> bytes:
    return b"".join(LENGTH.pack(len(image)) + image for image in images)


ONE = elements(GOOD)


def message(shape=(1, 1), raw=ONE, datatype="BYTES", name="image", output="scores", **more):
    """Return a request to the route; `more` are integer or text parameters."""
    request = service_pb2.ModelInferRequest(model_name="classify")
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(raw)
    request.outputs.add(name=output)
    for key, value in more.items():
        field = "string_param" if isinstance(value, str) else "int64_param"
        setattr(request.parameters[key.replace("_", "-") if key.startswith("x_") else key], field, value)
    return request


INVALID, UNAVAILABLE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE
FAULTS = {
    "no image": (message((0, 1)), INVALID, "invalid request: input 'image': expected a batch of 1 to 8"),
    "shape beyond 32 bits": (message((2**40, 1)), INVALID, "input 'image': expected a batch"),
    "negative shape": (message((-1, 1)), INVALID, "string elements"),
    "two for one": (message((1, 2), elements(GOOD, GOOD)), INVALID, "unexpected shape"),
    "no batch": (message((1,)), INVALID, "unexpected shape"),
    "one for two": (message((2, 1)), INVALID, "expected 2 string elements"),
    "too many": (message((9, 1), elements(*[GOOD] * 9)), INVALID, "batch-size must be <= 8"),
    "datatype": (message(raw=b"1234", datatype="FP32"), INVALID, "data-type is 'FP32'"),
    "input": (message(name="picture"), INVALID, "unexpected inference input"),
    "output": (message(output="words"), INVALID, "unexpected inference output"),
    "length": (message(raw=LENGTH.pack(2**31) + GOOD), INVALID, "incomplete string data"),
    "damaged": (message(raw=elements(GOOD[:20_000])), INVALID, "invalid image: "),
    "one damaged": (message((2, 1), elements(GOOD, GOOD[:20_000])), INVALID, "invalid image: "),
    "no time": (message(timeout=1), UNAVAILABLE, "deadline exceeded: "),
    "time as text": (message(timeout="soon"), INVALID, "'timeout' parameter"),
    "variant": (message(x_variant="v9"), INVALID, "unknown x-variant"),
}


@pytest.fixture(scope="module")
def stub(server):
    with grpc.insecure_channel(url(server, "grpc")) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture(autouse=True)
def others_are_served(server):
    """After each test both variants answer: a breaker that opened would refuse requests by name."""
    yield
    with Classifier(url(server, "grpc")) as classifier:
        for variant in ("v1", "v2"):
            assert classifier.classify(COFFEE, variant=variant).labels[0].index == ESPRESSO


@cases(("request_", "status", "text"), **FAULTS)
def test_callers_fault_is_not_the_variants(stub, request_, status, text):
    outcomes = []
    for _ in range(ATTEMPTS):
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request_, timeout=WATCHDOG_S)
        outcomes.append((caught.value.code(), text in caught.value.details()))

    assert set(outcomes) == {(status, True)}


def test_callers_that_leave_blame_nobody(stub):
    """A cancelled request says nothing about its variant."""
    for _ in range(ATTEMPTS):
        call = stub.ModelInfer.future(message())
        time.sleep(0.001)
        call.cancel()
