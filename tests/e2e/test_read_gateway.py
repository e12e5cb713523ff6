"""The gateway in front of models that read text: answers, encodings, errors, and the v2 protocol."""

import base64
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from nereid import Reader
from tests.e2e.conftest import url
from tests.labels import BLANK, LABEL, WORDS
from tests.proof import REQUESTS
from tests.supervised import running_gateway

pytestmark = pytest.mark.slow

WATCHDOG_S = 60
CLIENTS: dict[str, Any] = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway of `read_text`: its ports by protocol."""

    ports: dict[str, int]

    def send(self, path: str, body: bytes | None = None, kind: str = "image/png", **headers: str) -> Any:
        """Send a request; return its status, media type and body."""
        address = f"http://127.0.0.1:{self.ports['http']}{path}"
        request = urllib.request.Request(address, body, {"Content-Type": kind, **headers})
        try:
            with urllib.request.urlopen(request, timeout=WATCHDOG_S) as answer:
                return answer.status, answer.headers["content-type"], answer.read()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.headers["content-type"], refused.read()

    def json(self, path: str, body: bytes | None = None, **options: str) -> tuple[int, Any]:
        """Send a request; return its status and its JSON."""
        status, _, text = self.send(path, body, **options)
        return status, json.loads(text)


@pytest.fixture(scope="module")
def read_gateway(text_server, tmp_path_factory) -> Iterator[Gateway]:
    """A gateway of two models that knows only the address of their server."""
    words = "--url", url(text_server, "http"), "--model", "read_text", "--model", "read_text_v1"
    log = tmp_path_factory.mktemp("gateway") / "log"
    with running_gateway(log, *words, "--grpc-port", "0") as ports:
        yield Gateway(ports)
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def expected(text_server) -> list[dict[str, Any]]:
    """The lines as a client reads them from the server."""
    with Reader(url(text_server, "grpc")) as reader:
        found = reader.read(LABEL)
    return [{"text": each.text, "confidence": each.confidence, "box": each.box} for each in found.lines]


def test_every_kind_of_body_is_read(read_gateway, expected):
    """A raw image, a form and JSON have the lines of the server, and the route's variant."""
    boundary = b"--x\r\nContent-Disposition: form-data; name=file; filename=a.png\r\n\r\n"
    form = boundary + LABEL + b"\r\n--x--\r\n"
    document = json.dumps({"image": base64.b64encode(LABEL).decode()}).encode()

    answers = [
        read_gateway.json("/v1/read", LABEL),
        read_gateway.json("/v1/read", form, kind="multipart/form-data; boundary=x"),
        read_gateway.json("/v1/models/read_text/read?route_key=alice", document, kind="application/json"),
    ]

    for status, answer in answers:
        assert status == 200
        lines = [{**line, "box": tuple(map(tuple, line["box"]))} for line in answer["lines"]]
        assert lines == expected
        assert (answer["model"], answer["variant"], answer["version"]) == ("read_text", "v1", "1")
        assert answer["timings_ms"]["inference"] > 0
    assert [answer["reason"] for _, answer in answers] == ["weight", "weight", "route-key"]
    assert read_gateway.json("/v1/models/read_text_v1/read", LABEL)[1]["variant"] == ""


def test_image_without_text_has_no_lines(read_gateway):
    """No text is an answer, not an error."""
    status, answer = read_gateway.json("/v1/read", BLANK)

    assert (status, answer["lines"]) == (200, [])


def test_answer_has_the_encoding_of_old_consumers(read_gateway):
    """GBK has the same JSON, and the media type says so."""
    status, kind, body = read_gateway.send("/v1/read?encoding=gbk", LABEL)

    assert (status, kind) == (200, "application/json; charset=gbk")
    assert [line["text"] for line in json.loads(body.decode("gbk"))["lines"]] == WORDS


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "words"),
    [
        ("/v1/read", b"no image", 400, "invalid_image", "expected an image file"),
        ("/v1/read", b"", 400, "invalid_image", "empty"),
        ("/v1/read", LABEL[:2000], 400, "invalid_image", ""),
        ("/v1/read?variant=v9", LABEL, 400, "invalid_request", "expected one of v1"),
        ("/v1/read?encoding=latin-1", LABEL, 400, "invalid_request", "encoding must be one of utf-8, gbk"),
        ("/v1/read?top_k=3", LABEL, 400, "invalid_request", "unknown query parameter 'top_k'"),
        ("/v1/models/nothing/read", LABEL, 404, "not_found", "read_text, read_text_v1"),
        ("/predict", LABEL, 404, "not_found", "no model classifies images here"),
        ("/v1/detect", LABEL, 404, "not_found", "got: read_text reads text"),
        ("/v1/waybill", LABEL, 404, "not_found", "got: read_text reads text"),
        ("/v1/models/read_text/predict", LABEL, 400, "invalid_request", "POST /v1/models/read_text/read"),
        ("/v1/models/read_text/waybill", LABEL, 400, "invalid_request", "POST /v1/models/read_text/read"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("/") else "",
)
def test_errors_name_their_reason(read_gateway, path, body, status, code, words):
    """Each bad request has a code and a message; another task names the endpoint that fits."""
    found, answer = read_gateway.json(path, body)

    assert (found, answer["error"]["code"]) == (status, code)
    assert words in answer["error"]["message"]


def test_fields_are_answered(text_server, tmp_path):
    """A gateway of all readers finds the one of documents; GBK has the same fields."""
    models = ("read_text", "read_waybill")
    words = "--url", url(text_server, "http"), *(word for name in models for word in ("--model", name))
    with running_gateway(tmp_path / "log", *words) as ports:
        gateway = Gateway(ports)
        status, answer = gateway.json("/v1/waybill", LABEL)
        kind, body = gateway.send("/v1/waybill?encoding=gbk", LABEL)[1:]
        lines = gateway.json("/v1/models/read_waybill/read", LABEL)[1]
        default = gateway.json("/v1/read", LABEL)[1]

    fields = {field["name"]: field for field in answer["fields"]}
    assert (status, answer["model"]) == (200, "read_waybill")
    number = fields["tracking_number"]
    assert (number["value"], number["valid"], number["corrected"]) == (WORDS[1], True, [])
    assert np.allclose(number["box"], answer["lines"][1]["box"], atol=0.1)
    assert (kind, json.loads(body.decode("gbk"))["fields"]) == (
        "application/json; charset=gbk",
        answer["fields"],
    )
    assert [line["text"] for line in lines["lines"]] == WORDS
    assert default["model"] == "read_text"


def test_models_are_listed_with_their_task(read_gateway):
    """The page shows a tab for each task; readiness reads an image."""
    assert read_gateway.json("/v1/models") == (
        200,
        [{"name": "read_text", "task": "read"}, {"name": "read_text_v1", "task": "read"}],
    )
    assert read_gateway.json("/readyz") == (200, {"ready": True, "reason": ""})


def test_metrics_have_the_endpoint(read_gateway):
    """Images are counted by endpoint, model, variant and outcome, and in the live view."""
    read_gateway.json("/v1/read", LABEL)

    page = read_gateway.send("/metrics")[2].decode()
    labels = 'endpoint="/v1/read",model="read_text",outcome="ok",variant="v1"'
    assert f"nereid_gateway_images_total{{{labels}}}" in page
    assert read_gateway.json("/v1/live")[1]["outcomes"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_outputs_of_any_length_cross_the_v2_protocol(read_gateway, protocol, expected):
    """NVIDIA's own client gets three lines, none, and an error of one image per request."""
    client = CLIENTS[protocol]

    def tensor(*images: bytes) -> Any:
        made = client.InferInput("image", [len(images), 1], "BYTES")
        made.set_data_from_numpy(np.array([[each] for each in images], dtype=object))
        return made

    with client.InferenceServerClient(f"127.0.0.1:{read_gateway.ports[protocol]}") as connection:
        found, blank = (connection.infer("read_text", [tensor(each)]) for each in (LABEL, BLANK))
        with pytest.raises(InferenceServerException, match="one image per request"):
            connection.infer("read_text", [tensor(LABEL, LABEL)])

    texts = [each if isinstance(each, str) else each.decode() for each in found.as_numpy("text")[0]]
    assert texts == WORDS
    assert found.as_numpy("box").shape == (1, 3, 4, 2)
    assert found.as_numpy("confidence")[0].tolist() == pytest.approx(
        [each["confidence"] for each in expected]
    )
    shapes = [blank.as_numpy(name).shape for name in ("text", "confidence", "box")]
    assert shapes == [(1, 0), (1, 0), (1, 0, 4, 2)]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("text", "needs numbers, got BYTES"),
        ("confidence", "needs a fixed length"),
        ("box", "needs a fixed length"),
    ],
)
def test_classification_of_lines_is_refused(read_gateway, protocol, name, reason):
    """Triton ends if it sorts texts, or the confidences of an image without text."""
    client = CLIENTS[protocol]
    tensor = client.InferInput("image", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[BLANK]], dtype=object))
    outputs = [client.InferRequestedOutput(name, class_count=2)]

    with (
        client.InferenceServerClient(f"127.0.0.1:{read_gateway.ports[protocol]}") as connection,
        pytest.raises(InferenceServerException, match=f"classification {reason}"),
    ):
        connection.infer("read_text", [tensor], outputs=outputs)

    assert read_gateway.json("/v1/read", BLANK)[0] == 200


@pytest.mark.slow
def test_schemathesis_finds_no_fault(read_gateway, tmp_path):
    """Requests generated from the OpenAPI document get only described responses, and no 5xx."""
    address = f"http://127.0.0.1:{read_gateway.ports['http']}/openapi.json"
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,"
    checks += "response_schema_conformance"
    command = [sys.executable, "-m", "schemathesis.cli", "run", address, "--checks", checks]
    command += ["-H", "X-Request-Timeout-Ms: 30000", "--seed", "1"]
    command += ["--max-examples", str(max(10, REQUESTS // 100)), "--phases", "examples,coverage,fuzzing"]
    command += ["--include-path-regex", "read|waybill|detect|models"]

    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ}
    )

    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
