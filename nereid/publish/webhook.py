"""A webhook of a drop folder: a signed `POST /publish?file=classify@monday.onnx` puts its body into it.

Three headers sign a request: `nereid-timestamp`, in Unix seconds; `nereid-sha256`, the SHA-256 of the body;
and `nereid-signature`, the HMAC-SHA256 (RFC 2104) of timestamp, file name and SHA-256, each on a line of its
own, with a shared secret as the key. So the signature is checked before the body is read. `GET` of the same
address returns the result of the publication.
"""

import contextlib
import hashlib
import hmac
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from nereid import files, json_lines
from nereid.errors import OperationFailed, WrongUsage
from nereid.publish.drop_entry import SUFFIX
from nereid.publish.drop_folder import JOURNAL, Line, Report

PATH = "/publish"
TIMESTAMP, SHA256, SIGNATURE = "nereid-timestamp", "nereid-sha256", "nereid-signature"
# How far the clocks may differ; a signature is valid for as long, and once.
VALID_S = 300.0
MIN_SECRET_BYTES = 16
# That of a network in one file. Source: protobuf's limit of a message.
MAX_BYTES = 2 * 2**30
READ_S, PIECE_BYTES = 30.0, 2**20


class Rejected(Exception):
    """A request has a wrong signature, name or body."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def read_secret(path: Path) -> bytes:
    """Return the secret in a file.

    Raises:
        WrongUsage: it is too short.
        OSError: the file cannot be read.
    """
    secret = path.read_bytes().strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise WrongUsage(
            f"'{path}': expected a secret of {MIN_SECRET_BYTES} bytes or more, got {len(secret)}"
        )
    return secret


def sign(secret: bytes, timestamp: str, name: str, sha256: str) -> str:
    """Return the signature of a request, in hexadecimal digits."""
    return hmac.new(secret, f"{timestamp}\n{name}\n{sha256}".encode(), hashlib.sha256).hexdigest()


@contextlib.contextmanager
def listening(folder: Path, secret: bytes, host: str, port: int, report: Report) -> Iterator[int]:
    """Listen for requests until the context ends; yields the port.

    Args:
        folder: the drop folder.
        secret: key of the signatures.
        host, port: address; port 0 selects a free one.
        report: receives a line for each file.

    Raises:
        OperationFailed: the address cannot be used.
    """
    inbox = _Inbox(folder, secret, report)

    class Handler(_Handler):
        """A request handler of this folder."""

        box = inbox

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise OperationFailed(f"cannot listen on {host}:{port}: {error.strerror}") from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="webhook", daemon=True)
    with server:
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


class _Inbox:
    """Checks requests, and stores their bodies in the folder."""

    def __init__(self, folder: Path, secret: bytes, report: Report) -> None:
        self.folder, self.report = folder, report
        self._secret = secret
        self._lock = threading.Lock()
        # The signatures of the last files, with the times in seconds at which they expire.
        self._used: dict[str, float] = {}

    def check(self, name: str, timestamp: str, sha256: str, signature: str) -> None:
        """Check the name and the signature of a request."""
        is_plain = Path(name).name == name and name.isprintable() and not name.startswith(".")
        if not (is_plain and name.endswith(SUFFIX)):
            wanted = f"expected a name such as classify@monday{SUFFIX}"
            raise Rejected(HTTPStatus.BAD_REQUEST, f"file: {wanted}, got {name!r}")
        if not all((timestamp, sha256, signature)):
            wanted = f"expected the headers {TIMESTAMP}, {SHA256} and {SIGNATURE}"
            raise Rejected(HTTPStatus.UNAUTHORIZED, wanted)
        expected = sign(self._secret, timestamp, name, sha256)
        if not hmac.compare_digest(signature.encode(), expected.encode()):
            parts = f"the secret, {TIMESTAMP}, the file's name and {SHA256}"
            raise Rejected(HTTPStatus.UNAUTHORIZED, f"{SIGNATURE}: expected that of {parts}")
        if not timestamp.isdecimal() or abs(time.time() - int(timestamp)) > VALID_S:
            wanted = f"expected the time in Unix seconds, within {VALID_S:g} s"
            raise Rejected(HTTPStatus.UNAUTHORIZED, f"{TIMESTAMP}: {wanted}, got '{timestamp}'")

    def use(self, signature: str) -> None:
        """Let a signature be used once."""
        now = time.time()
        with self._lock:
            self._used = {each: end for each, end in self._used.items() if end > now}
            if signature in self._used:
                raise Rejected(HTTPStatus.CONFLICT, "this request has been received before")
            self._used[signature] = now + 2 * VALID_S

    def store(self, name: str, sha256: str, pieces: Iterator[bytes]) -> None:
        """Put a file into the folder, complete or not at all."""
        target = self.folder / name
        if target.exists():
            raise Rejected(HTTPStatus.CONFLICT, f"'{name}' still waits in the folder")
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".webhook-") as file:
            found = hashlib.sha256()
            for piece in pieces:
                found.update(piece)
                file.write(piece)
            if (got := found.hexdigest()) != sha256.lower():
                raise Rejected(HTTPStatus.BAD_REQUEST, f"{SHA256}: expected {got}, got {sha256}")
            file.flush()
            os.fsync(file.fileno())
            try:
                os.link(file.name, target)  # does not replace a file, as a rename would
            except FileExistsError:
                raise Rejected(HTTPStatus.CONFLICT, f"'{name}' still waits in the folder") from None
        self.report(f"{name}: received by the webhook")

    def state(self, name: str) -> dict[str, object]:
        """Return what has become of a file."""
        if (self.folder / name).exists():
            return {"file": name, "state": "waiting"}
        lines = [line for line in json_lines.read(self.folder / JOURNAL, Line) if line.entry == name]
        if not lines:
            raise Rejected(HTTPStatus.NOT_FOUND, f"no file '{name}' has been received")
        last = lines[-1]
        if last.version:
            return {"file": name, "state": "published", "model": last.model, "version": last.version}
        return {"file": name, "state": "rejected", "reason": last.reason}


class _Handler(BaseHTTPRequestHandler):
    box: _Inbox
    # Of each read, so also of a slow head.
    timeout = READ_S
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Store the body."""
        self._answer(self._receive)

    def do_GET(self) -> None:
        """Return what has become of a file."""
        self._answer(self._show)

    def log_message(self, *_: object) -> None:
        """Write nothing: the folder's own lines are enough."""

    def _receive(self) -> tuple[HTTPStatus, dict[str, object]]:
        name, sha256, signature = self._checked()
        length = self.headers.get("content-length", "")
        if not length.isdecimal():
            raise Rejected(HTTPStatus.LENGTH_REQUIRED, "expected the header content-length")
        if int(length) > MAX_BYTES:
            raise Rejected(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected at most {MAX_BYTES} bytes, got {length}"
            )
        self.box.use(signature)
        self.box.store(name, sha256, self._pieces(int(length)))
        return HTTPStatus.ACCEPTED, {"file": name, "state": "waiting"}

    def _show(self) -> tuple[HTTPStatus, dict[str, object]]:
        name, _, _ = self._checked()
        return HTTPStatus.OK, self.box.state(name)

    def _checked(self) -> tuple[str, str, str]:
        address = urlsplit(self.path)
        if address.path != PATH:
            raise Rejected(HTTPStatus.NOT_FOUND, f"expected {PATH}?file=NAME{SUFFIX}")
        (name, *_) = parse_qs(address.query).get("file", [""])
        timestamp, sha256, signature = (self.headers.get(each, "") for each in (TIMESTAMP, SHA256, SIGNATURE))
        self.box.check(name, timestamp, sha256, signature)
        return name, sha256, signature

    def _pieces(self, length: int) -> Iterator[bytes]:
        while length:
            piece = self.rfile.read(min(length, PIECE_BYTES))
            if not piece:
                raise Rejected(HTTPStatus.BAD_REQUEST, f"the body ends {length} bytes too early")
            length -= len(piece)
            yield piece

    def _answer(self, act: Callable[[], tuple[HTTPStatus, dict[str, object]]]) -> None:
        try:
            status, content = act()
        except Rejected as error:
            status, content = error.status, {"error": str(error)}
        except TimeoutError:
            status, content = HTTPStatus.REQUEST_TIMEOUT, {"error": f"nothing arrived for {READ_S:g} s"}
        except OSError as error:
            is_full = error.errno in files.FULL
            status = HTTPStatus.INSUFFICIENT_STORAGE if is_full else HTTPStatus.INTERNAL_SERVER_ERROR
            content = {"error": f"cannot be stored: {error.strerror}"}
        body = json.dumps(content).encode() + b"\n"
        # What is left of a rejected body is not read.
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
