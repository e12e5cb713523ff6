"""Both classifiers without Triton: servers that fail, arguments of every kind, and requests over HTTP."""

import asyncio
import gc
import itertools
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import ClassVar

import numpy as np
import PIL.Image
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from nereid.base.assets import COFFEE
from nereid.cli.options import collect
from nereid.client import client_errors as errors
from nereid.client import retry
from nereid.client.request import check_options, image_tensor, region_tensor
from nereid.client.rest import JSON_LENGTH_HEADER, RestClient
from nereid.client.retry import Attempts, RetryBudget
from nereid.tasks.classify.client import AsyncClassifier, Classifier
from nereid.tasks.classify.result import Label, labels
from nereid.tasks.detect.client import Detector
from nereid.tasks.read.client import Reader
from tests.classifiers import PREDICTION, WAYS, Script, error, opened, prediction_response, serving, silent
from tests.routes import wait_until
from tests.tables import cases, rows

both_ways = pytest.mark.parametrize("way", ["sync", "async"])
PHOTO = COFFEE.read_bytes()
PATIENCE_S, WATCHDOG_S = 0.2, 30.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", retry.FIRST_PAUSE_S / 10)


@cases(
    plain=("0.950000:967:espresso", Label(967, "espresso", 0.95)),
    colon_in_the_name=("0.1:3:a: b", Label(3, "a: b", 0.1)),
    no_labels=("0.1:3", Label(3, "", 0.1)),
)
def test_label_is_read_from_tritons_form(entry, expected):
    assert labels([entry.encode()]) == (expected,)


@rows(
    ("400", "why", errors.RequestRefused),
    ("429", "slow down", errors.Overloaded),
    ("500", "why", errors.ServerFailed),
    (None, "why", errors.ServerFailed),
    ("404", "an exception occurred in the client while decoding the response: <p>", errors.Unreachable),
    ("StatusCode.INVALID_ARGUMENT", "why", errors.RequestRefused),
    ("StatusCode.UNAVAILABLE", "failed to connect to all addresses", errors.Unreachable),
    ("StatusCode.UNAVAILABLE", "This protocol is restricted, expecting header", errors.RequestRefused),
    ("StatusCode.DEADLINE_EXCEEDED", "Deadline Exceeded", errors.TimedOut),
    ("StatusCode.RESOURCE_EXHAUSTED", "SERVER: Received message larger than max", errors.RequestRefused),
    ("StatusCode.UNKNOWN", "Received http2 header with status: 413", errors.RequestRefused),
    ("StatusCode.RESOURCE_EXHAUSTED", "too many", errors.Overloaded),
    ("StatusCode.UNKNOWN", "Stream removed (Data frame with END_STREAM flag received)", errors.Unreachable),
    ("StatusCode.DEADLINE_EXCEEDED", "Stream removed (Deadline Exceeded)", errors.TimedOut),
)
def test_exception_has_the_party_at_fault(status, text, kind):
    got = errors.from_triton(InferenceServerException(text, status))

    assert (type(got), str(got)) == (kind, text)


def given_up_s(way: str, url: str, protocol: str) -> float:
    """Return how long a request took that is given up, or fail if it is not."""
    done: Future[float] = Future()

    def run() -> None:
        try:
            with opened(way, url, protocol) as classifier:
                begin = time.monotonic()
                with pytest.raises(errors.TimedOut):
                    classifier.classify(PHOTO, timeout_s=PATIENCE_S)
                done.set_result(time.monotonic() - begin)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(WATCHDOG_S)


@rows(*((*pair, False) for pair in WAYS), *((way, "http", True) for way in ("sync", "async")))
def test_server_without_a_response_is_given_up(way, protocol, is_dribbling):
    """The time limit holds for the connection and for the whole response, not for one of its bytes."""
    head = Script(b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n", trickle_s=0.05)
    with serving(head) if is_dribbling else silent() as url:
        assert given_up_s(way, url, protocol) >= PATIENCE_S


@both_ways
@cases(
    "broken",
    garbage=b"garbage",
    html=b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<p>Hi</p>",
    a_proxys_html=b"HTTP/1.1 502 Bad\r\nContent-Length: 9\r\n\r\n<p>Hi</p>",
    other_json=b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    half_an_answer=b"HTTP/1.1 200 OK\r\nContent-Le",
    shape=PREDICTION.replace(b'"shape": [1, 1]', b'"shape": [9, 9]'),
    label=prediction_response("nonsense"),
    length=PREDICTION.replace(b"\x11\0\0\0", b"\xff\0\0\0"),
    version=PREDICTION.replace(b"model_version", b"model-version"),
    another_requests=prediction_response("0.95:967:espresso", id="another"),
)
def test_response_of_another_peer_is_the_networks_fault(way, broken):
    with serving(Script(broken, hangs_up=True)) as url, opened(way, url, "http") as classifier:
        (outcome,) = classifier.classify_many([PHOTO], timeout_s=5)

    assert type(outcome) is errors.Unreachable


@both_ways
@cases(
    cut=(None, errors.Unreachable, 4),
    unavailable=(error("unavailable: its breaker is open", 503), errors.Unavailable, 4),
    overloaded=(error("overloaded: 64 requests", 503), errors.Overloaded, 1),
    timeout=(error("deadline exceeded: 20 ms", 503), errors.TimedOut, 1),
    failed=(error("inference failed: why", 500), errors.ServerFailed, 1),
    refused=(error("invalid image: why", 400), errors.RequestRefused, 1),
    malformed=(PREDICTION.replace(b'"shape": [1, 1]', b'"shape": [9, 9]'), errors.Unreachable, 1),
)
def test_only_safe_requests_are_repeated(step, kind, count, way):
    script = Script(step)
    with serving(script) as url, opened(way, url, "http") as classifier, pytest.raises(kind):
        classifier.classify(PHOTO)

    assert len(script.bodies("/infer")) == count


@both_ways
def test_budget_ends_repeating(way):
    script = Script(None)
    with serving(script) as url, opened(way, url, "http", concurrency=1) as classifier:
        outcomes = list(classifier.classify_many([PHOTO] * 40))

    assert {type(outcome) for outcome in outcomes} == {errors.Unreachable}
    assert 40 < len(script.bodies("/infer")) <= 47


@pytest.mark.parametrize(("in_flight", "repeated"), [(1, 4), (2, 4), (3, 5), (16, 31)])
def test_budget_grows_with_requests_in_flight_and_is_spent_once(in_flight, repeated):
    """Requests lost together are all repeated; a second burst on a dead server repeats nothing."""
    budget, count = RetryBudget(), 10 * in_flight

    for expected in (repeated, 0):
        with ExitStack() as stack:
            for _ in range(in_flight):
                stack.enter_context(budget.in_flight())
            assert [budget.record_failure() for _ in range(count)] == [True] * expected + [False] * (
                count - expected
            )


def test_request_that_fails_late_is_repeated_like_the_others():
    budget, many = RetryBudget(), 15
    with budget.in_flight():
        with ExitStack() as others:
            for _ in range(many):
                others.enter_context(budget.in_flight())
            assert all(budget.record_failure() for _ in range(many))
            for _ in range(many):
                budget.record_success()
        assert budget.record_failure()

    while budget.spent_tokens:
        budget.record_success()
    assert [budget.record_failure() for _ in range(5)] == [True] * 4 + [False]  # as small as before


def test_answers_pay_for_repetition():
    """A full budget does not grow with further answers."""
    budget = RetryBudget()
    for _ in range(1000):
        budget.record_success()
    assert [budget.record_failure() for _ in range(5)] == [True] * 4 + [False]

    for _ in range(25):
        budget.record_success()

    assert [budget.record_failure() for _ in range(3)] == [True, True, False]


@both_ways
def test_all_requests_in_flight_may_be_lost_together(way):
    many = 16
    script = Script(*[threading.Barrier(many, timeout=WATCHDOG_S)] * many, PREDICTION)
    with serving(script) as url, opened(way, url, "http", concurrency=many) as classifier:
        outcomes = list(classifier.classify_many([PHOTO] * many))

    assert [outcome.timings.attempts for outcome in outcomes] == [2] * many


def test_pauses_double_until_the_deadline():
    """All four attempts together outlast the time in which a proxy notices that a server is gone."""
    attempts = Attempts(RetryBudget(), timeout_s=PATIENCE_S * 100)

    for factor in (1, 2, 4):
        expected = pytest.approx(factor * retry.FIRST_PAUSE_S, rel=retry.JITTER)
        assert attempts.record_failure(errors.Unreachable("why")) == expected
    assert attempts.record_failure(errors.Unreachable("why")) is None
    assert Attempts(RetryBudget(), timeout_s=1e-9).record_failure(errors.Unreachable("why")) is None


class Image(bytes):
    gone: ClassVar[list[int]] = []

    def __del__(self) -> None:
        self.gone.append(len(self))


async def fail(way: str, url: str) -> None:
    with suppress(errors.NereidError):
        if way == "async":
            async with AsyncClassifier(url, "http") as classifier:
                await classifier.classify(Image(b"image"), timeout_s=0.3)
        else:
            with Classifier(url, "http") as blocking:
                blocking.classify(Image(b"image"), timeout_s=0.3)


@both_ways
@cases("step", refused=error("invalid image: x"), broken_connection=None, silence="silence")
def test_failed_request_leaves_nothing_to_the_collector(way, step):
    """Cycles of errors and frames would keep each refused image until the collector runs."""
    Image.gone.clear()
    gc.disable()
    try:
        with serving(Script(step)) as url:
            asyncio.run(fail(way, url))
    finally:
        gc.enable()

    assert Image.gone


FORKED = """
import os, sys
from nereid.tasks.classify.client import Classifier
from nereid.base.assets import COFFEE

child = None
with Classifier(sys.argv[1], "http") as classifier:
    for _ in range(2):
        for outcome in classifier.classify_many([COFFEE] * 2, request_id=str(os.getpid())):
            assert outcome.labels
        child = os.fork() if child is None else child
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_fork_has_connections_of_its_own():
    script = Script(PREDICTION)
    with serving(script) as url:
        subprocess.run([sys.executable, "-c", FORKED, url], check=True, timeout=30)

    sent = {(peer, re.search(rb'"id":"(\d+)"', body)[1]) for peer, body in script.peers}
    assert len({process for _, process in sent}) == 2
    assert len(sent) == len({peer for peer, _ in sent})


def test_error_does_not_wait_for_requests_in_flight():
    script, ended = Script("silence"), threading.Event()

    def source() -> Iterator[bytes]:
        yield PHOTO
        wait_until(lambda: script.peers, "the request")
        raise KeyboardInterrupt

    def interrupt(url: str) -> None:
        with suppress(KeyboardInterrupt), Classifier(url, "http") as classifier:
            next(classifier.classify_many(source(), timeout_s=60))
        with pytest.raises(RuntimeError, match="the client is closed"):
            classifier.classify(PHOTO)
        ended.set()

    with serving(script) as url:
        threading.Thread(target=interrupt, args=[url], daemon=True).start()
        assert ended.wait(20)


def test_connection_that_the_server_closed_is_not_used():
    """Servers close idle connections, which costs no attempt. With asyncio the loop detects it."""
    with serving(Script(PREDICTION, hangs_up=True)) as url, Classifier(url, "http") as classifier:
        classifier.classify(PHOTO)
        time.sleep(0.05)

        assert classifier.classify(PHOTO).timings.attempts == 1


@both_ways
@cases(
    top_k=({"top_k": 0}, "top_k must be at least 1, got 0"),
    timeout_s=({"timeout_s": 0}, "timeout_s must be more than 0"),
    letters=({"route_key": "caf\xe9"}, "x-route-key must be printable ASCII, got 'caf\xe9'"),
    line_break=({"variant": "v1\r\nx-evil: 1"}, "x-variant must be printable ASCII"),
    request_id=({"request_id": "\n"}, "request_id must be printable ASCII"),
    number=({"headers": {"x-a": 5}}, "x-a must be printable ASCII, got 5"),
    injected=({"headers": {"x-a: 1\r\nx-b": "2"}}, "a header must not be named 'x-a: 1"),
    framing=({"headers": {"Content-Length": "2"}}, "a header must not be named 'content-length'"),
    misspelt=({"varaint": "v9"}, "unknown option 'varaint', expected one of headers, request_id, "),
)
def test_wrong_argument_never_reaches_the_server(options, message, way):
    with opened(way, "127.0.0.1:1") as classifier:
        with pytest.raises(ValueError, match=message):
            classifier.classify(PHOTO, **options)
        with pytest.raises(ValueError, match=message):
            classifier.classify_many([PHOTO], **options)


@pytest.mark.parametrize("client", [Detector, Reader])
def test_option_of_another_task_is_refused(client):
    with client("127.0.0.1:1") as opened_client, pytest.raises(ValueError, match="unknown option 'top_k'"):
        opened_client.infer(PHOTO, top_k=5)


def test_images_whose_results_differ_in_size_share_no_request():
    with Reader("127.0.0.1:1") as reader, pytest.raises(ValueError, match="batch_size must be 1"):
        reader.read_many([PHOTO], batch_size=2)


@both_ways
@cases(
    scheme=({"url": "http://localhost:8000"}, "url must be HOST:PORT without a scheme"),
    no_port=({"url": "localhost"}, "url must be HOST:PORT without a scheme"),
    port=({"url": "localhost:99999"}, "url must be HOST:PORT"),
    user=({"url": "user@localhost:1"}, "url must be HOST:PORT"),
    bare_IPv6=({"url": "::1:8000"}, r"an IPv6 address in \[\], got '::1:8000'"),
    protocol=({"protocol": "rest"}, "protocol must be one of http, grpc, got 'rest'"),
    concurrency=({"concurrency": 0}, "concurrency must be at least 1, got 0"),
)
def test_invalid_argument_is_refused(arguments, message, way):
    with pytest.raises(ValueError, match=message), opened(way, **({"url": "localhost:1"} | arguments)):
        pass


BAD = "in ensemble 'x', invalid image: "


def refusal(*bad: int, count: int) -> bytes:
    listed = "; ".join(f"image {index}: why {index}" for index in bad)
    return error(f"{BAD}{len(bad)} of {count} images cannot be used: {listed}")


def predictions(count: int) -> bytes:
    return prediction_response(*(f"0.5:{index}:n{index}" for index in range(count)))


@both_ways
@cases(
    two_bad=([refusal(0, 2, count=4), predictions(2)], [f"{BAD}why 0", "n0", f"{BAD}why 2", "n1"]),
    all_bad=([refusal(0, 1, 2, 3, count=4)], [f"{BAD}why {index}" for index in range(4)]),
    too_large=([error("batch-size must be <= 3"), predictions(3), predictions(1)], ["n0", "n1", "n2", "n0"]),
    bad_in_a_later_part=(
        [error("batch-size must be <= 2"), predictions(2), refusal(0, count=2), predictions(1)],
        ["n0", "n1", f"{BAD}why 0", "n0"],
    ),
    malformed=([refusal(9, count=4), *[predictions(1)] * 4], ["n0"] * 4),
    refused=([error("invalid request: no such variant")], ["invalid request: no such variant"] * 4),
)
def test_bad_images_of_a_request_fail_alone(steps, expected, way):
    script = Script(*steps)
    with serving(script) as url, opened(way, url, "http") as classifier:
        outcomes = list(classifier.classify_many([PHOTO] * 4, batch_size=4))

    got = [str(item) if isinstance(item, errors.RequestRefused) else item.labels[0].name for item in outcomes]
    assert got == expected
    assert len(script.bodies("/infer")) == len(steps)


@both_ways
@pytest.mark.parametrize("batch_size", [1, 2])
def test_outcomes_come_before_the_sources_error(way, batch_size):
    def source() -> Iterator[bytes]:
        yield from [PHOTO] * 3
        raise RuntimeError("camera gone")

    with serving(Script(PREDICTION)) as url, opened(way, url, "http") as classifier:
        outcomes = classifier.classify_many(source(), batch_size)
        assert len([next(outcomes) for _ in range(3)]) == 3
        with pytest.raises(RuntimeError, match="camera gone"):
            next(outcomes)


@both_ways
def test_outcomes_name_their_images(way, tmp_path):
    """Also those that cannot be read; a picture and an open file have the name of the file."""
    photo, missing = tmp_path / "photo.jpg", tmp_path / "missing.jpg"
    photo.write_bytes(PHOTO)
    with (
        PIL.Image.open(photo) as picture,
        photo.open("rb") as file,
        serving(Script(predictions(5))) as url,
        opened(way, url, "http") as classifier,
    ):
        images = [PHOTO, missing, str(photo), picture, file, picture.convert("L"), 5]
        outcomes = list(classifier.classify_many(images, batch_size=8))

    names = ["images[0]", missing, photo, photo, photo, "images[5]", "images[6]"]
    assert [outcome.image for outcome in outcomes] == [str(name) for name in names]
    bad = {index: type(item.__cause__) for index, item in enumerate(outcomes) if isinstance(item, Exception)}
    assert bad == {1: FileNotFoundError, 6: TypeError}
    assert {type(outcomes[index]) for index in bad} == {errors.UnusableImage}


def test_images_are_read_little_ahead():
    counter = itertools.count()
    with serving(Script(PREDICTION)) as url, Classifier(url, "http", concurrency=2) as classifier:
        outcomes = classifier.classify_many(PHOTO for _ in counter)
        next(outcomes)
        outcomes.close()

    assert next(counter) <= 6


def test_outcomes_do_not_wait_for_a_slow_source():
    received = asyncio.Event()

    async def source():
        yield PHOTO
        await received.wait()
        yield PHOTO

    async def run(url: str) -> int:
        count = 0
        async with AsyncClassifier(url, "http") as classifier, asyncio.timeout(5):
            async for _ in classifier.classify_many(source()):
                count += 1
                received.set()
        return count

    with serving(Script(PREDICTION)) as url:
        assert asyncio.run(run(url)) == 2


@pytest.mark.parametrize("end", ["close", "timeout"])
def test_outcomes_may_be_left_early(end):
    async def leave(url: str) -> None:
        async with AsyncClassifier(url, "http", concurrency=1) as classifier:
            outcomes = classifier.classify_many(itertools.repeat(PHOTO))
            assert (await anext(outcomes)).labels
            if end == "close":
                await outcomes.aclose()
                return
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(outcomes), 0.05)

    with serving(Script(PREDICTION, "silence")) as url:
        asyncio.run(asyncio.wait_for(leave(url), 10))


def test_ipv6_address_has_brackets():
    with serving(Script(PREDICTION), "::1") as url, Classifier(url, "http") as classifier:
        assert classifier.classify(PHOTO).labels


def test_silent_addresses_share_the_time(monkeypatch):
    """A name with several silent addresses takes no longer than one of them."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        # To be patient with each takes longer than the watchdog.
        addresses = [(2, 1, 6, "", full.getsockname())] * 400
        monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: addresses)
        url = f"name:{full.getsockname()[1]}"

        assert given_up_s("sync", url, "http") >= PATIENCE_S


def test_threads_leave_nothing_open():
    with serving(Script(PREDICTION)) as url, Classifier(url, "http") as classifier:
        counts = []
        for _ in range(20):
            thread = threading.Thread(target=classifier.classify, args=[PHOTO])
            thread.start()
            thread.join()
            counts.append(len(list(Path("/proc/self/fd").iterdir())))

    assert counts[-1] <= counts[1]


def test_folders_are_searched_for_images(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "sub").mkdir()
    for name in ("b.JPG", "a.png", "sub/c.webp", "notes.txt"):
        (tmp_path / name).touch()

    paths = collect([tmp_path, tmp_path / "notes.txt"])

    assert paths == [tmp_path / name for name in ("a.png", "b.JPG", "sub/c.webp", "notes.txt")]
    for name, message in (("nope", "nope' does not exist"), ("empty", "has no image")):
        with pytest.raises(ValueError, match=message):
            collect([tmp_path / name])


FILES = [b"one", b"", b"three"]


class Recorded(RestClient):
    async def _send(self, method, path, headers, body, read):
        return headers, b"".join(body)


@pytest.mark.parametrize("memory", ["sent", "shared"])
def test_request_is_that_of_tritonclient(memory):
    theirs = tritonclient.http.InferInput("image", [len(FILES), 1], "BYTES")
    if memory == "sent":
        ours = image_tensor("http", FILES)
        theirs.set_data_from_numpy(np.array(FILES, dtype=object).reshape(-1, 1))
    else:
        ours = region_tensor("http", len(FILES), "r", 20)
        theirs.set_shared_memory("r", 20)
    options = check_options({"top_k": 3, "request_id": "7"}, 30.0)

    arguments = options.infer_arguments("http", ours, ["scores", "variant"], "scores", 2.0)
    headers, sent = asyncio.run(Recorded("h:1").infer("m", **arguments))

    outputs = [
        tritonclient.http.InferRequestedOutput("scores", class_count=3),
        tritonclient.http.InferRequestedOutput("variant"),
    ]
    client = tritonclient.http.InferenceServerClient
    body, json_size = client.generate_request_body([theirs], outputs, request_id="7", timeout=2_000_000)
    head = int(headers.get(JSON_LENGTH_HEADER, len(sent)))
    assert (JSON_LENGTH_HEADER in headers) == (json_size is not None)
    assert json.loads(sent[:head]) == json.loads(body[:json_size])
    assert sent[head:] == body[json_size or len(body) :]
