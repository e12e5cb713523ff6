"""Callers that send photos to a gateway at a fixed pace, and keep the outcome of each request."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import httpx

TIMEOUT_S = 10.0
JPEG = {"content-type": "image/jpeg"}


@dataclass(frozen=True, slots=True)
class Answer:
    """Begin and duration of a request, and its outcome: `ok`, the code of an error, or `no response`."""

    begin_s: float
    seconds: float
    outcome: str


class PhotoCallers:
    """Sends photos while the context lasts; a caller that is late leaves out requests.

    Args:
        address: HOST:PORT of the gateway.
        count: of callers; each has its own connection.
        period_s: between the begins of two requests of a caller.
        photo: returns the next photo; it may be replaced at any time.
    """

    def __init__(self, address: str, count: int, period_s: float, photo: Callable[[], bytes]) -> None:
        self.photo = photo
        self.answers: list[Answer] = []
        self._url, self._period_s = f"http://{address}/predict", period_s
        self._over = threading.Event()
        # The callers take turns, so that their requests do not arrive together.
        delays = (number * period_s / count for number in range(count))
        self._threads = [threading.Thread(target=self._call, args=[delay]) for delay in delays]

    def __enter__(self) -> "PhotoCallers":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join()

    def outcomes(self, since_s: float, until_s: float) -> Counter[str]:
        """Return the number of requests that began in a span of monotonic time, by outcome."""
        return Counter(each.outcome for each in list(self.answers) if since_s <= each.begin_s < until_s)

    def _call(self, delay_s: float) -> None:
        next_s = time.monotonic() + delay_s
        with httpx.Client(timeout=TIMEOUT_S) as client:
            while not self._over.wait(max(0.0, next_s - time.monotonic())):
                begin_s = time.monotonic()
                outcome = self._send(client)
                self.answers.append(Answer(begin_s, time.monotonic() - begin_s, outcome))
                missed = max(0, int((time.monotonic() - next_s) / self._period_s))
                next_s += (missed + 1) * self._period_s

    def _send(self, client: httpx.Client) -> str:
        try:
            answer = client.post(self._url, content=self.photo(), headers=JPEG)
        except httpx.HTTPError:
            return "no response"
        return "ok" if answer.is_success else str(answer.json()["error"]["code"])
