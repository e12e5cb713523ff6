"""The client's parts that need no server, and how it reports one that is not there."""

import socket
import socketserver
import threading
import time

import pytest
from tritonclient.utils import InferenceServerException

from clients.classifier import Classifier, Label, RequestRefused, ServerFailed, _label, _translate
from clients.samples import COFFEE
from ops.classify import collect
from ops.embedded import free_ports


@pytest.mark.parametrize(
    ("entry", "label"),
    [
        ("0.950000:967:espresso", Label(967, "espresso", 0.95)),
        ("0.1:3:a: b", Label(3, "a: b", 0.1)),
        ("0.1:3", Label(3, "", 0.1)),
    ],
    ids=["plain", "colon in the name", "no labels"],
)
def test_label_is_read_from_tritons_form(entry, label):
    """Triton's classification extension answers SCORE:INDEX:NAME."""
    assert _label(entry) == label


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("400", RequestRefused),
        ("404", RequestRefused),
        ("StatusCode.INVALID_ARGUMENT", RequestRefused),
        ("StatusCode.NOT_FOUND", RequestRefused),
        ("500", ServerFailed),
        ("StatusCode.UNAVAILABLE", ServerFailed),
        (None, ServerFailed),
    ],
)
def test_exception_says_whose_fault_it_was(status, kind):
    """The same fault is the same class over both protocols, with the server's own words."""
    error = _translate(InferenceServerException("why", status))

    assert (type(error), str(error)) == (kind, "why")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_unreachable_server_is_the_servers_fault(protocol):
    """Nobody listening is an error of the documented kind, over both protocols."""
    (port,) = free_ports(1)

    with Classifier(f"127.0.0.1:{port}", protocol, timeout_s=5) as classifier, pytest.raises(ServerFailed):
        classifier.classify(COFFEE)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_silent_server_is_given_up(protocol):
    """A server that accepts and never answers costs the timeout; the watchdog is ten times that."""
    begin = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with Classifier(address, protocol, timeout_s=1) as classifier, pytest.raises(ServerFailed):
            classifier.classify(COFFEE)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<p>Hi</p>",
        b"HTTP/1.1 200 OK\r\nContent-Le",
    ],
    ids=["closed", "garbage", "html", "half an answer"],
)
def test_foreign_server_is_the_servers_fault(answer):
    """Whatever answers instead of Triton, and whenever it hangs up, the error is of the documented kind."""

    class Foreign(socketserver.BaseRequestHandler):
        """Takes one request and answers what it was told."""

        def handle(self):
            """Answer the request."""
            self.request.recv(100_000)
            self.request.sendall(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Foreign) as foreign:
        thread = threading.Thread(target=foreign.serve_forever)
        thread.start()
        try:
            with Classifier(f"127.0.0.1:{foreign.server_address[1]}", "http", timeout_s=5) as classifier:
                (outcome,) = classifier.classify_many([COFFEE])
        finally:
            foreign.shutdown()
            thread.join()

    assert type(outcome) is ServerFailed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"route_key": "caf\xe9"}, "x-route-key must be printable ASCII, got 'caf\xe9'"),
        ({"variant": "v1\r\nx-evil: 1"}, "x-variant must be printable ASCII"),
    ],
    ids=["top_k", "letters", "line break"],
)
def test_wrong_argument_never_reaches_the_server(options, message):
    """What no server could answer is the caller's ValueError."""
    with Classifier("127.0.0.1:1") as classifier, pytest.raises(ValueError, match=message):
        classifier.classify(COFFEE, **options)


def test_folders_are_searched_for_images(tmp_path):
    """A folder stands for the images in it, sorted; a file stands for itself, whatever its name."""
    (tmp_path / "sub").mkdir()
    for name in ("b.JPG", "a.png", "sub/c.webp", "notes.txt"):
        (tmp_path / name).touch()

    found = collect([tmp_path, tmp_path / "notes.txt"])

    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "a.png",
        "b.JPG",
        "sub/c.webp",
        "notes.txt",
    ]


def test_missing_or_empty_path_is_named(tmp_path):
    """Nothing to classify is an error, not an empty success."""
    with pytest.raises(ValueError, match="nope does not exist"):
        collect([tmp_path / "nope"])
    with pytest.raises(ValueError, match="holds no image"):
        collect([tmp_path])
