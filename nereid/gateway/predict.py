"""`POST /predict` and `POST /v1/classify`: from a body to an answer, or to nothing if the client has gone."""

import asyncio
import re
from types import TracebackType

from nereid.client.classifier_errors import ClassifierError, Overloaded
from nereid.client.prediction import Prediction
from nereid.client.request import Options
from nereid.contract import OPTION_HEADERS
from nereid.gateway import image_size as images
from nereid.gateway.answers import Answer, BatchAnswer, FailedResult, Result, TimingsMs, scores
from nereid.gateway.failures import Failure, from_classifier
from nereid.gateway.http.http_request import Exchange, Reply, json_reply
from nereid.gateway.http.middleware import FAULTS, log
from nereid.gateway.http.tracing import is_word
from nereid.gateway.http.upload import MOST_TOP_K, BatchBody, BatchImage, ClientClosed
from nereid.gateway.request_timings import Spent
from nereid.gateway.state import CLIENT_CLOSED, Gateway

PARAMETERS = ("top_k", "variant", "version", "route_key")
HEADERS = {name: header.encode() for name, header in OPTION_HEADERS.items()}
# gRPC takes no other names, and would read the value of one in `-bin` as base64.
_RULE_HEADER = re.compile(r"x-route-[a-z0-9-]{1,56}(?<!-bin)")
# Triton's gRPC takes 8 KiB of metadata.
MOST_RULE_HEADERS = 16
# What says nothing about the image.
SERVERS = FAULTS | {"overloaded", "deadline_exceeded"}


async def predict(gateway: Gateway, exchange: Exchange) -> Reply:
    """Classify one image."""
    settings = gateway.settings
    timeout_s = exchange.timeout_s(settings.default_timeout_s, settings.max_timeout_s)
    options = read_options(exchange, exchange.query(PARAMETERS))
    gateway.admission.check(timeout_s - exchange.elapsed_s())
    image = await gateway.uploads.one(exchange, timeout_s - exchange.elapsed_s())
    received_s = exchange.stages_s["receive"] = exchange.elapsed_s()
    async with Watch(exchange):
        prediction, spent = await classify(gateway, exchange, image, options, timeout_s)
    exchange.variant = gateway.metrics.variant(prediction.variant)
    return json_reply(
        Answer(
            exchange.request_id,
            prediction.model,
            prediction.variant,
            prediction.version,
            prediction.reason,
            scores(prediction),
            timings_ms(exchange, received_s, spent),
        )
    )


async def classify_batch(gateway: Gateway, exchange: Exchange) -> Reply:
    """Classify several images; each is admitted, and fails, on its own."""
    settings = gateway.settings
    timeout_s = exchange.timeout_s(settings.default_timeout_s, settings.max_timeout_s)
    query = exchange.query(PARAMETERS)
    gateway.admission.check(timeout_s - exchange.elapsed_s())
    batch = await gateway.uploads.several(exchange, timeout_s - exchange.elapsed_s())
    received_s = exchange.stages_s["receive"] = exchange.elapsed_s()
    gateway.buckets.take(exchange.key, len(batch.images) - 1, is_debt=True)
    options = read_options(exchange, merged(query, batch))
    # A batch leaves half of what there is to others.
    room = asyncio.Semaphore(max(1, gateway.admission.limit // 2))
    failures: list[Failure] = []

    async def outcome(place: int, image: BatchImage) -> Result | FailedResult:
        name = place if image.id is None else image.id
        async with room:
            try:
                found, spent = await classify(gateway, exchange, image.image, options, timeout_s)
            except Exception as error:
                failures.append(_as_failure(error))
                return FailedResult(name, failures[-1].reason)
        return Result(
            name,
            found.model,
            found.variant,
            found.version,
            found.reason,
            scores(found),
            timings_ms(exchange, received_s, spent),
        )

    async with Watch(exchange), asyncio.TaskGroup() as group:
        tasks = [group.create_task(outcome(place, image)) for place, image in enumerate(batch.images)]
    _judge(exchange, failures, len(tasks))
    return json_reply(BatchAnswer(exchange.request_id, [task.result() for task in tasks]))


def _as_failure(error: Exception) -> Failure:
    if isinstance(error, Failure):
        return error
    failure = Failure("inference_failed", "the gateway failed; its log has the request id")
    failure.__cause__ = error
    return failure


def _judge(exchange: Exchange, failures: list[Failure], count: int) -> None:
    """Note faults of the server; a batch that it answered nothing of, for its own sake, fails whole.

    Raises:
        Failure: that of one image, if it holds for all of them.
    """
    faults = [failure for failure in failures if failure.code in FAULTS]
    if len(failures) == count and all(failure.code in SERVERS for failure in failures):
        raise (faults or failures)[0]
    for fault in faults:
        log.warning("request %s: %s: %r", exchange.request_id, fault.code, fault.__cause__)
        exchange.outcome = fault.code


async def classify(
    gateway: Gateway, exchange: Exchange, image: bytes, options: Options, timeout_s: float
) -> tuple[Prediction, Spent]:
    """Have one image classified within admission; gives the prediction and how long that took.

    Raises:
        Failure: it is too large, was not let in, or could not be classified.
    """
    spent = Spent()
    outcome, variant = "inference_failed", ""
    try:
        prediction = await _admitted(gateway, exchange, image, options, timeout_s, spent)
        outcome, variant = "ok", gateway.metrics.variant(prediction.variant)
    except Failure as failure:
        outcome = failure.code
        raise
    except asyncio.CancelledError:
        outcome = CLIENT_CLOSED
        raise
    finally:
        exchange.images += 1
        gateway.count_image(exchange.endpoint, variant, outcome, spent)
    return prediction, spent


async def _admitted(
    gateway: Gateway, exchange: Exchange, image: bytes, options: Options, timeout_s: float, spent: Spent
) -> Prediction:
    settings, admission = gateway.settings, gateway.admission
    if not image:
        raise Failure("invalid_image", "there are no bytes in it")
    images.check(image, settings.max_pixels, settings.max_side_px)
    permit = await spent.waiting(admission.take(_left_s(exchange, timeout_s)))
    try:
        asked: Options = {**options, "timeout_s": _left_s(exchange, timeout_s)}
        prediction = await spent.asking(gateway.upstream.classify(image, **asked))
    except asyncio.CancelledError:
        asyncio.get_running_loop().call_later(permit.rest_s(), permit.release)
        raise
    except ClassifierError as error:
        if isinstance(error, Overloaded):
            permit.refused()
        permit.release()
        raise from_classifier(error, timeout_s, admission.retry_after_s()) from error
    except BaseException:
        permit.release()
        raise
    permit.answered()
    return prediction


def _left_s(exchange: Exchange, timeout_s: float) -> float:
    if (left_s := timeout_s - exchange.elapsed_s()) > 0:
        return left_s
    raise Failure("deadline_exceeded", f"no answer within {timeout_s:.3g} s")


def read_options(exchange: Exchange, given: dict[str, str]) -> Options:
    """Return how images are classified, as parameters and headers say.

    Raises:
        Failure: one of them cannot be meant, or two disagree.
    """
    options: Options = {"request_id": exchange.request_id, "top_k": _top_k(given.get("top_k", "5"))}
    for name, header in HEADERS.items():
        in_query, in_head = given.get(name, ""), exchange.header(header)
        if in_query and in_head and in_query != in_head:
            raise Failure("invalid_request", f"{name} is {in_query!r}, but {header.decode()} is {in_head!r}")
        if value := in_query or in_head:
            if not is_word(value):
                raise Failure("invalid_request", f"{name} must be printable ASCII of at most 128 characters")
            options[name] = value  # type: ignore[literal-required]
    handed_on = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in exchange.headers.items()
        if name.startswith(b"x-route-") and name != HEADERS["route_key"]
    }
    if len(handed_on) > MOST_RULE_HEADERS:
        raise Failure(
            "invalid_request", f"at most {MOST_RULE_HEADERS} headers x-route-…, got {len(handed_on)}"
        )
    for name, value in handed_on.items():
        if not (_RULE_HEADER.fullmatch(name) and is_word(value)):
            raise Failure(
                "invalid_request", f"{name[:64]!r} is no header of a rule, or its value is not ASCII"
            )
    if exchange.continues_trace:
        handed_on["traceparent"] = exchange.traceparent
    if handed_on:
        options["headers"] = handed_on
    return options


def merged(query: dict[str, str], batch: BatchBody) -> dict[str, str]:
    """Return the parameters of the query and of the body together.

    Raises:
        Failure: they disagree.
    """
    given = dict(query)
    for name in PARAMETERS:
        value = getattr(batch, name)
        if value in (None, ""):
            continue
        if given.setdefault(name, str(value)) != str(value):
            raise Failure(
                "invalid_request", f"{name} is {given[name]!r} in the query, but {value!r} in the body"
            )
    return given


def timings_ms(exchange: Exchange, received_s: float, spent: Spent) -> TimingsMs:
    """Return the stages of a request that is about to be answered."""
    stages = received_s, spent.admission_s, spent.inference_s, exchange.elapsed_s()
    return TimingsMs(*(round(seconds * 1e3, 3) for seconds in stages))


def _top_k(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MOST_TOP_K:
        return int(text)
    raise Failure("invalid_request", f"top_k must be a whole number of 1..{MOST_TOP_K}, got {text[:64]!r}")


class Watch:
    """While it lasts, the client's leaving cancels what the current task awaits.

    Raises:
        ClientClosed: the client has left.
    """

    __slots__ = ("_exchange", "_has_left", "_task", "_watching")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._has_left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task
        self._task = task
        self._watching = asyncio.create_task(self._watch())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.cancel()
        # It keeps the frames that it is cancelled in, which hold this.
        del self._watching
        if self._has_left:
            self._task.uncancel()
            raise ClientClosed from None

    async def _watch(self) -> None:
        while (await self._exchange.receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._task.cancel()
