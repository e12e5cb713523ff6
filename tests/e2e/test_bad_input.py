"""Bad requests: each gets a clear error, no variant is blamed, others are served, and the server goes on."""

import json
import re
import struct
import time
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from nereid.base.assets import COFFEE
from nereid.client.client_errors import Unreachable
from nereid.gateway.http.app import create_gateway
from nereid.gateway.keys import KeyRing
from nereid.gateway.models import FixedModels
from nereid.gateway.settings import GatewaySettings
from nereid.server.ports import free_ports
from nereid.tasks.classify.client import Classifier
from tests.classifiers import opened
from tests.e2e.conftest import ESPRESSO, url
from tests.gateways import send
from tests.pictures import BOMB, encode
from tests.routes import WATCHDOG_S
from tests.tables import cases, rows

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


def post(server, model: str, body: bytes, **headers: Any) -> tuple[int, str]:
    address = f"http://{url(server, 'http')}/v2/models/{model}/infer"
    response = httpx.post(address, content=body, headers=headers, timeout=30)
    return response.status_code, response.text


def post_image(server, model: str, image: bytes, **headers: Any) -> tuple[int, str]:
    return post(server, model, image, **{"Inference-Header-Content-Length": "0"} | headers)


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
            assert classifier.classify(GOOD, variant=variant).labels[0].index == ESPRESSO


@pytest.mark.parametrize("model", ["classify", "classify_v1", "imagenet_preprocess"])
@cases(
    text=(b"not an image", "expected an image file .* got 12 bytes starting with b'not an i"),
    truncated=(GOOD[:20_000], "JPEG of 20000 bytes is damaged: Premature end of JPEG file"),
    header_only=(GOOD[:3], "JPEG of 3 bytes has no readable header"),
    empty_body=(b"", "expected the bytes of an image file .* got 0 bytes"),
    decompression_bomb=(BOMB, "expected at most 64000000 pixels, got 20000 x 20000"),
)
def test_bad_image_is_a_400_with_the_reason(image, message, server, model):
    status, text = post_image(server, model, image)

    assert status == 400
    assert re.search(f"invalid image: {message}", json.loads(text)["error"])


def test_header_of_another_encoding_is_a_400(server):
    status, text = post_image(server, "classify", GOOD, **{"x-route-key": b"caf\xe9"})

    assert (status, "invalid request: headers must be UTF-8" in text) == (400, True)


def test_extreme_image_is_answered(server):
    """A small file of 16,000 x 1 pixels is classified; resizing all of it would need too much memory."""
    encoded = encode(np.zeros((1, 16_000, 3), np.uint8))

    assert post_image(server, "classify", encoded)[0] == 200


@pytest.mark.parametrize("way", ["sync", "async"])
@rows(
    ("grpc", "http", "the port does not speak gRPC, .*; fix: Triton's gRPC port, by default 8001"),
    ("grpc", "metrics", "the port does not speak gRPC, .*; fix: Triton's gRPC port, by default 8001"),
    ("http", "grpc", "the port speaks gRPC; fix: Triton's HTTP port, by default 8000"),
    ("http", "metrics", "expected a response of Triton's HTTP port, .*; fix: the port; by default .*"),
    ("http", "closed", "no server listens there; fix: nereid serve, or the address of a server.*"),
    ("grpc", "closed", "no gRPC server listens there; fix: nereid serve, or the address of a server.*"),
)
def test_a_wrong_port_is_told(protocol, port, expected, server, root, way):
    address = f"localhost:{free_ports(1)[0]}" if port == "closed" else url(server, port)
    with opened(way, address, protocol) as classifier, pytest.raises(Unreachable) as caught:
        classifier.classify(GOOD)

    assert re.fullmatch(f"{re.escape(address)}: {expected}", str(caught.value))
    assert f"`{re.split('[,;]', expected)[0]}`" in (root / "docs" / "clients.md").read_text()


@pytest.mark.parametrize(("method", "path"), [("POST", "/predict"), ("GET", "/v2/models/classify")])
def test_gateway_tells_the_wrong_port(server, method, path):
    made = create_gateway(GatewaySettings(url=url(server, "grpc")), KeyRing(), FixedModels(("classify",)))

    response = send(made, method, path, content=GOOD, headers={"Content-Type": "image/jpeg"})

    assert (response.status_code, "the port speaks gRPC; fix: Triton's" in response.text) == (503, True)


def test_a_raw_image_without_its_header_is_explained(server, root):
    """Triton takes the body for JSON; the page has its message, with the header."""
    status, text = post(server, "classify", GOOD)

    page = (root / "docs" / "clients.md").read_text()
    (message,) = re.findall(
        r"^\| `(failed to parse[^`]*)` \|.*`Inference-Header-Content-Length: 0`", page, re.M
    )
    assert (status, message in text) == (500, True)  # a fault of the caller, which Triton takes for its own


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
