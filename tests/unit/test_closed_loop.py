"""The closed loop: what it counts, from a process of its own, too."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nereid.tune import closed_loop
from nereid.tune.closed_loop import Load, percentile, run, saturate, summary, within
from nereid.tune.connection import post


class Handler(BaseHTTPRequestHandler):
    """Answers with the status that is the path, after as many milliseconds as the body says."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        """Answer."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(int(body) / 1e3)
        self.send_response(int(self.path[1:]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words):
        """Say nothing."""


@pytest.fixture
def port():
    """A plain HTTP server's."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def request(port: int, status: int, wait_ms: int) -> bytes:
    """A request for such an answer."""
    return post("127.0.0.1", port, f"/{status}", str(wait_ms).encode(), {})


def test_refusals_are_no_answers(port):
    """They are counted apart, and have no rate and no latency."""
    load = saturate("127.0.0.1", port, [request(port, 503, 5)], concurrency=2, seconds=0.2)

    assert (load.rate, load.p99_ms, load.answered) == (0.0, 0.0, 0)
    assert load.failed > 0


def test_nobody_there_is_a_failure_of_each_caller(port):
    """Nothing listens on the port of a server that is gone."""
    load = saturate("127.0.0.1", 1, [b""], concurrency=3, seconds=0.1)

    assert load == Load(0.0, 0.0, 0.0, 0.0, 0, 3)


def test_caller_that_ends_with_any_error_is_a_failure(port):
    """Text cannot be sent, which is no error of the network; no load must not look like one that is well."""
    load = saturate("127.0.0.1", port, ["text"], concurrency=3, seconds=0.1)

    assert load == Load(0.0, 0.0, 0.0, 0.0, 0, 3)


def test_slow_answers_count_when_there_are_no_others(port):
    """One that takes longer than the load lasts is waited for."""
    load = saturate("127.0.0.1", port, [request(port, 200, 600)], concurrency=2, seconds=0.1)

    assert (load.answered, load.failed) == (2, 0)
    assert load.p50_ms >= 600
    assert 0 < load.rate < 4


def test_caller_that_is_never_answered_is_a_failure(port, monkeypatch):
    """A server that lets requests hang must not look fast for those that it answers."""
    monkeypatch.setattr(closed_loop, "DRAIN_S", 0.2)
    requests = [request(port, 200, 1), request(port, 200, 3_000)]

    load = saturate("127.0.0.1", port, requests, concurrency=4, seconds=0.3)

    assert load.answered > 0
    assert load.failed == 4


def test_failures_count_whenever_they_come():
    """Before the load is measured and while its end is waited for, too; latencies only between."""
    seen = [(0.0, 0.1, 503), (0.0, 0.3, 200), (0.3, 0.5, 200), (0.5, 1.1, 200), (0.6, 1.5, 503)]

    assert within(seen, 0.2, 1.0, 1.6) == summary(seen[2:4], 1.1 - 0.3, lost=2)


@pytest.mark.parametrize("begin_s", [0.41, 0.45, 0.5, 0.53])
def test_rate_of_batches_does_not_depend_on_where_a_span_begins(begin_s):
    """Eight answers every 0.1 s are 80 a second; by the clock they were 64 or 80 of half a second's."""
    ends = [round(0.1 * number, 1) for number in range(1, 13) for _ in range(8)]
    seen = [(end - 0.2, end, 200) for end in ends]

    assert within(seen, begin_s, begin_s + 0.48, 1.3).rate == pytest.approx(80)


def test_what_is_too_slow_for_the_span_counts_all_the_same():
    """With one answer or none in it, all of them are the best that is known."""
    seen = [(0.0, 2.0, 200)]

    assert within(seen, 0.2, 1.0, 2.1) == summary(seen, 2.1)


def test_other_process_asks_at_each_concurrency(port, tmp_path):
    """Requests are taken in turn; what comes back is by concurrency."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(request(port, 200, 1))

    loads = run(port, paths, [1, 3], 0.2)

    assert [*loads] == [1, 3]
    assert all(load.answered > 0 and load.failed == 0 and load.p99_ms >= 1 for load in loads.values())


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (99, 99), (100, 100), (0, 1)])
def test_percentile_is_one_of_the_values(percent, value):
    """The smallest that so many per cent do not exceed."""
    assert percentile(range(1, 101), percent) == value


def test_summary_counts_good_answers_only():
    """Others have no latency; no answer at all is no rate."""
    seen = [(0.0, 0.010 * number, 200) for number in range(1, 101)] + [(0.0, 9.0, 503)]

    assert summary(seen, 2.0, lost=1) == Load(50.0, 500.0, 900.0, 990.0, 100, 2)
    assert summary([], 2.0) == Load(0.0, 0.0, 0.0, 0.0, 0, 0)
