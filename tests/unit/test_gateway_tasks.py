"""The tasks of a gateway in front of fake upstreams: models by their outputs, answers, encodings."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nereid.base.task_registry import TASKS
from nereid.client.client_errors import RequestRefused
from nereid.client.result_kind import Timings
from nereid.gateway import inference
from nereid.gateway.failures import Failure
from nereid.gateway.models import Models
from nereid.gateway.state import Gateway
from nereid.tasks.detect.result import DETECTIONS, DetectedObject, Detection
from nereid.tasks.embed.result import Embedding
from nereid.tasks.read.result import Barcode, Correction, Field, PageSize, Reading, TextLine
from tests.gateways import IMAGE, NO_KEYS, PREDICTION, SMALL, Source, Upstream, Upstreams, asynchronous, send
from tests.pictures import save
from tests.tables import rows

BOX = ((1.0, 2.0), (5.0, 2.0), (5.0, 4.0), (1.0, 4.0))
CORNERS = [[1.0, 2.0], [5.0, 2.0], [5.0, 4.0], [1.0, 4.0]]
SOURCE = ("read_text", "1", "v1", "weight", "id", Timings(0, 1))
LINES = (TextLine("快递 A", 0.5, BOX),)
FIELDS = (
    Field(
        *("number", "RA1", 0.5, BOX, True, (Correction(1, "O", "0"),), "checksum", "EMS", False),
        candidates=("RA1", "RA2"),
    ),
    Field("weight", None, 0.0, None, None),
)
BARCODES = (Barcode("(00)1", "GS1-128", BOX),)
READING, WAYBILL_READING = Reading(LINES, (), BARCODES, *SOURCE), Reading(LINES, FIELDS, BARCODES, *SOURCE)
DETECTION = Detection((DetectedObject("cat", 0.5, (1.0, 2.0, 3.0, 4.0)),), *SOURCE)
OUTPUTS: dict[str, Collection[str]] = {
    "classify": ["scores", "variant"],
    "read_text": ["text", "confidence", "box"],
    "read_waybill": ["text", "confidence", "box", "field"],
    "cars": ["box", "score", "label"],
    "faces": ["embedding", "variant"],
    "half": ["box", "score"],
}
EMBEDDING = Embedding(np.array([0.6, -0.8], np.float32), *SOURCE)
RESULTS = {"classify": PREDICTION, "read_text": READING, "read_waybill": WAYBILL_READING}
RESULTS |= {"cars": DETECTION, "faces": EMBEDDING}
BARCODE = {"text": "(00)1", "symbology": "GS1-128", "box": CORNERS, "elements": {"00": "1"}, "page": 1}
LINE_ANSWERS = [{"text": "快递 A", "confidence": 0.5, "box": CORNERS, "page": 1}]


class Several(Source):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names, self.looked_up = list(names), list[str]()

    def names(self) -> list[str]:
        return self._names

    def outputs(self, name: str) -> list[str]:
        self.looked_up.append(name)
        return [*OUTPUTS.get(name, [])]


def gateway(*names: str, **results: Any) -> Any:
    upstreams = {name: Upstream(result) for name, result in {**RESULTS, **results}.items()}
    return Gateway(SMALL, NO_KEYS, Models(names[0], Several(names), Upstreams(upstreams)))


def test_every_task_has_its_answer():
    made = gateway(*RESULTS)

    models = {"read": "read_text", "waybill": "read_waybill", "detect": "cars", "embed": "faces"}
    answers = {task: send(made, "POST", f"/v1/{task}", content=IMAGE).json() for task in models}
    read, waybill, detect, embed = answers.values()

    for answer, model in zip(answers.values(), models.values(), strict=True):
        assert {*answer.pop("timings_ms")} == {"receive", "admission", "inference", "total"}
        assert len(answer.pop("request_id")) == 32
        source = [answer.pop(name) for name in ("model", "variant", "version", "reason")]
        assert source == [model, "v1", "1", "weight"]
    assert read == {"lines": LINE_ANSWERS, "barcodes": [BARCODE], "pages": []}
    field = {"name": "number", "value": "RA1", "confidence": 0.5, "box": CORNERS, "valid": True}
    missing = {"name": "weight", "value": None, "confidence": 0.0, "box": None, "valid": None}
    proof = {"proof": "checksum", "carrier": "EMS", "certain": False, "candidates": ["RA1", "RA2"]}
    proof["page"], missing["page"] = 1, 1
    assert waybill == {
        "fields": [
            {**field, "corrected": [{"position": 1, "from": "O", "to": "0"}], **proof},
            {**missing, "corrected": [], "proof": None, "carrier": None, "certain": False, "candidates": []},
        ],
        "lines": LINE_ANSWERS,
        "barcodes": [BARCODE],
        "pages": [],
    }
    assert detect == {"objects": [{"label": "cat", "score": 0.5, "box": [1.0, 2.0, 3.0, 4.0]}]}
    assert embed == {"embedding": [float(np.float32(0.6)), float(np.float32(-0.8))]}
    assert send(made, "POST", "/predict", content=IMAGE).json()["predictions"]


def test_fields_of_a_reader_are_listed():
    made = gateway(*RESULTS)

    for path in ("/v1/fields", "/v1/models/read_waybill/fields"):
        fields = {field["name"]: field for field in send(made, "GET", path).json()}
        assert fields["weight"] == {"name": "weight", "required": False, "carriers": []}
        number = fields["tracking_number"]
        assert (number["required"], "UPS" in number["carriers"]) == (True, True)
    refused = send(made, "GET", "/v1/models/read_text/fields")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")


def test_reader_of_documents_reads_lines_too():
    for path in ("/v1/read", "/v1/models/read_waybill/read"):
        answer = send(gateway("classify", "read_waybill"), "POST", path, content=IMAGE).json()
        assert (answer["lines"], "fields" in answer) == (LINE_ANSWERS, False)


def test_reader_returns_a_pdf_whose_text_can_be_searched():
    pypdfium2 = pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed: extra text")
    made = gateway("read_text", read_text=replace(READING, pages=(PageSize(40, 30),)))

    answer = send(made, "POST", "/v1/read?format=pdf", content=save(Image.new("RGB", (40, 30)), "PNG"))

    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/pdf")
    assert pypdfium2.PdfDocument(answer.content)[0].get_textpage().get_text_range() == "快递 A"
    pages = send(made, "POST", "/v1/read", content=IMAGE).json()["pages"]
    assert pages == [{"width": 40, "height": 30}]
    refused = send(gateway("read_text"), "POST", "/v1/read?format=pdf", content=IMAGE)
    assert (refused.status_code, "no output 'page_size'" in refused.text) == (400, True)


@rows(
    ("/v1/models/read_text/predict", 400, "model 'read_text' reads text"),
    ("/v1/models/read_text/classify", 400, "fix: POST /v1/models/read_text/read"),
    ("/v1/models/classify/read", 400, "fix: POST /v1/models/classify/predict"),
    ("/v1/models/read_text/waybill", 400, "fix: POST /v1/models/read_text/read"),
    ("/v1/waybill", 404, "available: classify classifies images, read_text reads text"),
    ("/v1/detect", 404, "no model finds objects here"),
    ("/v1/models/cars/detect", 404, "unknown model 'cars'"),
    ("/v1/read?encoding=latin-1", 400, "must be one of utf-8, gbk"),
)
def test_other_task_names_what_fits(path, status, message):
    answer = send(gateway("classify", "read_text"), "POST", path, content=IMAGE)

    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True)


@pytest.mark.parametrize("path", ["/v1/read", "/v1/waybill"])
def test_text_that_gbk_lacks_is_an_error(path):
    lines = (TextLine("café ☕", 0.5, BOX),)
    made = gateway("read_waybill", read_waybill=replace(WAYBILL_READING, lines=lines))

    answer = send(made, "POST", f"{path}?encoding=gbk", content=IMAGE)

    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "unencodable_text")
    assert "☕" in answer.json()["error"]["message"]
    page = made.metrics.page().decode()
    assert f'requests_total{{endpoint="{path}",model="read_waybill",outcome="unencodable_text"' in page
    assert f'images_total{{endpoint="{path}",model="read_waybill",outcome="ok"' in page
    assert send(made, "POST", path, content=IMAGE).status_code == 200


def test_models_have_their_task():
    made = gateway(*RESULTS, "odd", "half")

    tasks = {**dict(zip(RESULTS, ("classify", "read", "waybill", "detect", "embed"), strict=True)), "odd": ""}
    expected = [{"name": name, "task": task} for name, task in {**tasks, "half": ""}.items()]
    assert send(made, "GET", "/v1/models").json() == expected


@asynchronous
async def test_unknown_outputs_leave_the_choice_to_the_server():
    source, upstream = Several(["odd"]), Upstream()
    made = Gateway(SMALL, NO_KEYS, Models("odd", source, upstream))

    for task in (*TASKS, TASKS[-1]):
        assert {(await made.models.find(name, task)).name for name in (None, "odd")} == {"odd"}

    assert source.looked_up == ["odd"]  # not again before a pause


def test_model_of_another_task_is_not_served():
    made = Gateway(SMALL, NO_KEYS, Models("odd", Several(["odd"]), Upstream(READING)))

    for path, status in {"/predict": 503, "/v1/read": 200}.items():
        assert send(made, "POST", path, content=IMAGE).status_code == status


def test_model_that_no_longer_does_its_task_gives_way_to_another(monkeypatch):
    """It was replaced or removed while the gateway ran."""
    monkeypatch.setitem(OUTPUTS, "ships", OUTPUTS["cars"])
    ship = replace(DETECTION.objects[0], label="ship")
    made = gateway("classify", "cars", "ships", ships=replace(DETECTION, objects=(ship,)))
    answers = [send(made, "POST", "/v1/detect", content=IMAGE)]
    made.models.triton["cars"].outcome = RequestRefused("unexpected inference output 'boxes'")
    answers += [send(made, "POST", "/v1/detect", content=IMAGE) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 503, 200]
    assert answers[2].json()["objects"][0]["label"] == "ship"


@asynchronous
async def test_request_that_waited_while_its_model_was_replaced_is_sent():
    made = gateway("cars")
    model = await made.models.find("cars")
    calls = [inference.ImageInference(model, DETECTIONS, IMAGE, None, 1, (), "id") for _ in range(2)]
    await inference.send_inference(made.models.triton, calls[0], lambda: 1.0)
    waiting = inference.ImageInference(model, DETECTIONS, IMAGE, None, 1, (), "id")
    made.models.triton["cars"].outcome = RequestRefused("unexpected inference output 'boxes'")
    with pytest.raises(Failure, match="not served"):
        await inference.send_inference(made.models.triton, calls[1], lambda: 1.0)
    made.models.triton["cars"].outcome = DETECTION

    result = await inference.send_inference(made.models.triton, waiting, lambda: 1.0)

    assert (result.objects, model.task) == (DETECTION.objects, None)


@rows(("read_text", READING, True), ("cars", DETECTION, True), ("cars", RequestRefused("gone"), False))
def test_readiness_is_that_of_the_task(name, result, is_ready):
    answer = send(gateway(name, **{name: result}), "GET", "/readyz")

    assert answer.json()["ready"] == is_ready


@rows(
    ("read_waybill", "waybill", replace(WAYBILL_READING, fields=(replace(FIELDS[0], name=5),))),
    ("faces", "embed", replace(EMBEDDING, vector=np.ones((2, 2), np.float32))),
    ("classify", "predict", replace(PREDICTION, labels=(replace(PREDICTION.labels[0], score="x"),))),
    ids=("value", "shape", "text"),
)
def test_malformed_response_is_a_failure_of_the_model(model, endpoint, broken):
    """It is counted as such, and the image is not sent again."""
    upstream, path = Upstream(broken), f"/v1/models/{model}/{endpoint}"
    made = Gateway(SMALL, NO_KEYS, Models(model, Several([model]), upstream))

    answer = send(made, "POST", path, content=IMAGE)

    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "inference_failed")
    assert "the model's response is malformed" in answer.json()["error"]["message"]
    assert "retry-after" not in answer.headers
    images = [line for line in made.metrics.page().decode().splitlines() if "images_total{" in line]
    assert [("inference_failed" in line, line.split()[-1]) for line in images] == [(True, "1.0")]
    assert len(upstream.received) == 1
