"""A small HTTP server on loopback, for what a test receives."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def receiving(answer: Callable[[str, Message, bytes], tuple[int, bytes]], port: int = 0) -> Iterator[str]:
    """Run an HTTP server until the context ends, by default on a free port; gives HOST:PORT.

    `answer` returns the status and body for the path, headers and body of a GET or POST.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, page = answer(self.path, self.headers, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        do_GET = do_POST

        def log_message(self, *words: object) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
