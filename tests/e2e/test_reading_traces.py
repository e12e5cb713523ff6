"""The trace of a reader whose networks are models of the server: their spans are below its own."""

import random
import shutil
from collections import Counter

import httpx
import pytest

from nereid.base.assets import PARCEL_LABEL, TEXT_REPOSITORY
from tests.otlp import receiving, root_of
from tests.routes import WATCHDOG_S
from tests.supervised import serving

pytest.importorskip("cv2", reason="opencv is not installed: extra text")
pytestmark = pytest.mark.slow

NETWORKS = ("text_detect", "text_direction", "text_recognise")
STAGES = ("decode", "barcodes", "detect", "boxes", "crops", "direction", "recognise")


def test_networks_of_a_reader_are_in_its_trace(tmp_path):
    repository = shutil.copytree(TEXT_REPOSITORY, tmp_path / "models")
    trace, caller = f"{random.getrandbits(128):032x}", "b" * 16
    headers = {"traceparent": f"00-{trace}-{caller}-01", "Inference-Header-Content-Length": "0"}
    with receiving() as receiver:
        words = "--otlp", receiver.endpoint, "--trace-share", "0", "--access-log", "--profile", "ensemble"
        with serving(repository, tmp_path / "run", *words) as served:
            address = f"http://127.0.0.1:{served.ports['http']}/v2/models/read_text/infer"
            image = PARCEL_LABEL.read_bytes()
            answer = httpx.post(address, content=image, headers=headers, timeout=WATCHDOG_S)
            assert answer.status_code == 200
            names = ("route read_text", "attempt v1", "read_text_v1", *STAGES, *NETWORKS)
            spans = receiver.wait_for(trace, *names)
            line = served.access_line(trace)

    root_of(spans, caller)
    (reader,) = (span for span in spans if span.name == "read_text_v1")
    networks = [span for span in spans if span.name in NETWORKS]
    assert {span.parent for span in networks} == {reader.span}
    assert all(reader.begin_ns <= span.begin_ns <= span.end_ns <= reader.end_ns for span in networks)
    assert all(span.attributes["nereid.queue_ms"] >= 0 for span in networks)
    assert Counter(span.name for span in spans)["network"] == len(networks)
    assert line["name"] == "route read_text"
    assert {*STAGES} <= {*line["stages_ms"]}
    assert sum(line["stages_ms"].values()) == pytest.approx(line["ms"], rel=0.01)
