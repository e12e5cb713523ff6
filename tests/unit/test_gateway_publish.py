"""`POST /v1/publish`: an admin's network becomes the next version; what is refused leaves nothing."""

import sys

import pytest

from nereid.application import launcher
from nereid.base import files
from nereid.gateway.model_endpoints import NO_PUBLISHER_MESSAGE
from nereid.gateway.models import Models
from nereid.gateway.settings import GatewaySettings
from nereid.gateway.state import Gateway
from tests.gateways import NO_KEYS, RING, Source, Upstream, send
from tests.publishing import NET, unchanged
from tests.routes import adding
from tests.tables import cases

pytestmark = pytest.mark.process
OPTIONS = "accept_change=true&max_slowdown=100"
ADMIN = {"x-api-key": "admin"}


def publish(repository, query=OPTIONS, headers=ADMIN, content=None, keys=RING, model=NET):
    source = Source(other=NET, repository=repository)
    made = Gateway(GatewaySettings(), keys, Models(NET, source, lambda name, kind: Upstream()))
    body = adding(2).SerializeToString() if content is None else content
    return send(made, "POST", f"/v1/models/{model}/publish?{query}", content=body, headers=headers)


def test_upload_is_published(repository):
    answer = publish(repository, f"{OPTIONS}&share=10%25")

    assert answer.status_code == 200, answer.text
    assert {**answer.json(), "detail": ""} == {"model": NET, "version": 2, "detail": ""}
    assert (repository / NET / "2" / "model.onnx").read_bytes() == adding(2).SerializeToString()
    assert not (files.state_folder(repository) / "upload").exists()


@cases(
    no_keys=({"headers": {}, "keys": NO_KEYS}, 401, "fix: nereid key add NAME --scope admin"),
    no_key=({"headers": {}}, 401, "an API key is required"),
    scope_route=({"headers": {"x-api-key": "route"}}, 403, "lacks the scope 'admin'"),
    scope_infer=({"headers": {"x-api-key": "infer"}}, 403, "lacks the scope 'admin'"),
    no_network=({"content": b"a network"}, 409, "net.onnx"),
    other_results=({"query": "max_slowdown=100"}, 409, "--accept-change"),
    empty=({"content": b""}, 400, "got an empty body"),
    share=({"query": "share=200%25"}, 400, "expected 0 to"),
    no_share=({"query": "share=all"}, 400, "share: expected a share such as 10% or 0.1, got 'all'"),
    no_number=({"query": "tolerance=nan"}, 400, "tolerance: expected a number of at least 0, got 'nan'"),
    option=({"query": "repository=/"}, 400, "unknown query parameter 'repository'"),
    flag=({"query": "accept_change=no"}, 400, "expected true"),
    type=({"headers": {**ADMIN, "content-type": "text/html"}}, 415, "Content-Type"),
    size=({"headers": {**ADMIN, "content-length": str(2**31 + 1)}}, 413, "at most 2048 MiB"),
    model=({"model": "other"}, 404, "unknown model 'other'"),
)
def test_refused_upload_leaves_nothing(upload, status, reason, repository):
    with unchanged(repository):
        answer = publish(repository, **upload)

    assert answer.status_code == status, answer.text
    assert reason in answer.json()["error"]["message"]
    assert str(repository) not in answer.text


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise KeyError('x')"])
def test_process_that_crashes_is_no_fault_of_the_caller(repository, monkeypatch, end):
    monkeypatch.setattr(launcher, "command", lambda program: [sys.executable, "-c", f"import os; {end}"])

    answer = publish(repository)

    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["message"].startswith("the publication ended with status ")


def test_gateway_of_a_server_elsewhere_says_so():
    answer = publish(None)

    assert (answer.status_code, answer.json()["error"]["message"]) == (404, NO_PUBLISHER_MESSAGE)


def test_one_upload_at_a_time(repository):
    state = files.state_folder(repository)
    state.mkdir()

    with files.locked_file(state / "upload.lock", "another request"):
        answer = publish(repository)

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
