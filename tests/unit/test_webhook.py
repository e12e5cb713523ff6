"""The webhook of a drop folder: only complete files with a valid signature get into the folder."""

import hashlib
import http.client
import json
import socket
import time
from datetime import UTC, datetime

import pytest

from nereid import json_lines
from nereid.errors import OperationFailed, WrongUsage
from nereid.publish import webhook
from nereid.publish.drop_folder import JOURNAL, Line

pytestmark = pytest.mark.process
SECRET, NAME, BODY = b"a secret of the publisher", "classify@monday.onnx", b"a network"
WATCHDOG_S = 60


@pytest.fixture
def hook(tmp_path):
    """The port of a webhook whose folder is `tmp_path`."""
    with webhook.listening(tmp_path, SECRET, "127.0.0.1", 0, lambda line: None) as port:
        yield port


def send(port: int, method: str = "POST", body: bytes = BODY, path: str = "", **changes: str):
    """Send a signed request with some values replaced; returns status and content."""
    values = {
        "name": NAME,
        "timestamp": str(int(time.time())),
        "sha256": hashlib.sha256(BODY).hexdigest(),
    } | changes
    signature = webhook.sign(SECRET, values["timestamp"], values["name"], values["sha256"])
    headers = {
        webhook.TIMESTAMP: values["timestamp"],
        webhook.SHA256: values["sha256"],
        webhook.SIGNATURE: values.get("signature", signature),
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WATCHDOG_S)
    target = path or f"{webhook.PATH}?file={values.get('file', values['name'])}"
    connection.request(method, target, body if method == "POST" else None, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_signed_file_gets_into_the_folder(hook, tmp_path):
    assert send(hook) == (202, {"file": NAME, "state": "waiting"})
    assert (tmp_path / NAME).read_bytes() == BODY
    assert names(tmp_path) == {NAME}


TIME = "nereid-timestamp: expected the time in Unix seconds, within 300 s"
FILE = "file: expected a name such as classify@monday.onnx"


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"signature": "00"}, 401, "nereid-signature: expected that of the secret, "),
        ({"signature": ""}, 401, "expected the headers nereid-timestamp, "),
        ({"file": "other.onnx"}, 401, "nereid-signature: expected that of the secret, "),
        ({"timestamp": "1000"}, 401, TIME),
        ({"timestamp": "9999999999"}, 401, TIME),
        ({"timestamp": "now"}, 401, TIME),
        ({"body": b"another network"}, 400, "nereid-sha256: expected "),
        ({"name": "..%2Fup.onnx"}, 400, FILE),
        ({"name": ".hidden.onnx"}, 400, FILE),
        ({"path": "/other"}, 404, "expected /publish?file=NAME.onnx"),
        ({"method": "GET"}, 404, "no file 'classify@monday.onnx' has been received"),
    ],
    ids=str,
)
def test_wrong_request_leaves_nothing(changes, status, reason, hook, tmp_path):
    answered = send(hook, **changes)

    assert (answered[0], answered[1]["error"].startswith(reason)) == (status, True), answered
    assert names(tmp_path) == set()


def test_file_is_not_replaced(hook, tmp_path):
    assert send(hook)[0] == 202
    repeated, again = send(hook), send(hook, timestamp=str(int(time.time()) - 5))
    (tmp_path / NAME).unlink()
    replayed = send(hook, timestamp=str(int(time.time()) - 5))

    assert (repeated[0], again[0], replayed[0]) == (409, 409, 409)
    assert again[1] == {"error": f"'{NAME}' still waits in the folder"}
    assert replayed[1] == {"error": "this request has been received before"}


def test_short_body_leaves_nothing(hook, tmp_path):
    timestamp, sha256 = str(int(time.time())), hashlib.sha256(BODY).hexdigest()
    head = (
        f"POST {webhook.PATH}?file={NAME} HTTP/1.1\r\n{webhook.TIMESTAMP}: {timestamp}\r\n"
        f"{webhook.SHA256}: {sha256}\r\n"
        f"{webhook.SIGNATURE}: {webhook.sign(SECRET, timestamp, NAME, sha256)}\r\n"
    )
    answers = []
    for rest in (f"content-length: {len(BODY) + 5}\r\n\r\na network", "\r\n"):
        with socket.create_connection(("127.0.0.1", hook), timeout=WATCHDOG_S) as connection:
            connection.sendall((head + rest).encode())
            connection.shutdown(socket.SHUT_WR)
            answers.append(b"".join(iter(lambda c=connection: c.recv(4096), b"")))

    assert answers[0].startswith(b"HTTP/1.1 400 ")
    assert b"the body ends 5 bytes too early" in answers[0]
    assert answers[1].startswith(b"HTTP/1.1 411 ")
    assert names(tmp_path) == set()


def test_result_is_shown(hook, tmp_path):
    published, rejected = ("classify", 4, ""), ("classify", 0, "no network")
    shown = []
    for model, version, reason in (published, rejected):
        with (tmp_path / JOURNAL).open("a+b") as log:
            line = Line(datetime.now(UTC), NAME, "0" * 64, model, version, reason, False, "")
            json_lines.append(log, line)
        shown.append(send(hook, "GET"))

    assert shown == [
        (200, {"file": NAME, "state": "published", "model": "classify", "version": 4}),
        (200, {"file": NAME, "state": "rejected", "reason": "no network"}),
    ]


def test_short_secret_is_refused(tmp_path):
    (tmp_path / "secret").write_text("short\n")

    with pytest.raises(WrongUsage, match="expected a secret of 16 bytes or more, got 5"):
        webhook.read_secret(tmp_path / "secret")


def test_taken_port_is_named(hook, tmp_path):
    with (
        pytest.raises(OperationFailed, match=f"cannot listen on 127.0.0.1:{hook}: "),
        webhook.listening(tmp_path, SECRET, "127.0.0.1", hook, print),
    ):
        pass
