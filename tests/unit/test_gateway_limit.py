"""The adaptive limit in front of a simulated server: instances with a queue, open-loop arrivals."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from nereid.gateway.admission.concurrency_limit import INITIAL, MIN_LIMIT, ConcurrencyLimit

Service = Callable[[int, random.Random], float]
MOST = 64


@dataclass
class Server:
    """A queue in front of instances that each take up to `batch` requests at once."""

    service: Service
    instances: int
    rate_per_s: float
    batch: int = 1
    now_s: float = 0.0
    answered: int = 0
    in_flight: int = 0
    limits: list[int] = field(default_factory=list)
    events: list[tuple[float, int, list[float]]] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(0)
        self.gradient = ConcurrencyLimit(MOST, 0.0)
        self.idle = self.instances
        self._push(0.0, [])

    def run(self, until_s: float) -> "Server":
        """Go on until a time; an event without arrivals in it is the next arrival."""
        self.answered, self.limits = 0, []
        while self.events[0][0] < until_s:
            self.now_s, _, done = heapq.heappop(self.events)
            if done:
                self._answer(done)
            else:
                self._push(self.now_s + self.chance.expovariate(self.rate_per_s), [])
                if self.in_flight < self.gradient.limit:
                    self.in_flight += 1
                    self.waiting.append(self.now_s)
            self._dispatch()
        return self

    @property
    def limit(self) -> float:
        """The mean limit, as answers met it."""
        return sum(self.limits) / len(self.limits)

    def _answer(self, done: list[float]) -> None:
        """Let an instance be idle again, and the limit learn."""
        self.idle += 1
        for arrived_s in done:
            self.in_flight -= 1
            self.answered += 1
            self.gradient.sample(self.now_s - arrived_s, self.in_flight, self.now_s)
            self.limits.append(self.gradient.limit)

    def _dispatch(self) -> None:
        """Give what waits to instances that are idle."""
        while self.waiting and self.idle:
            taken, self.waiting = self.waiting[: self.batch], self.waiting[self.batch :]
            self.idle -= 1
            self._push(self.now_s + self.service(len(taken), self.chance), taken)

    def _push(self, at_s: float, done: list[float]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self.events, (at_s, self.chance.getrandbits(60), done))


def about(mean_s: float) -> Service:
    """A service time that varies as an image's does."""
    return lambda size, chance: chance.gammavariate(4, mean_s / 4)


@pytest.mark.parametrize("instances", [2, 4, 16])
def test_limit_finds_the_knee_and_stays_there(instances):
    """Under three times the load it is within twice the knee, with a floor, and the server is never idle."""
    server = Server(about(0.02), instances, rate_per_s=150 * instances)

    first, last = server.run(10).limit, server.run(60)

    assert max(first, last.limit) < 2 * max(instances, MIN_LIMIT)
    assert last.limit > instances
    assert last.answered / 50 > 0.96 * 50 * instances


def test_batches_are_a_reason_to_allow_more():
    """A server that answers eight in little more time than one gets what fills its batches."""
    server = Server(lambda size, chance: 0.008 + 0.001 * size, 2, rate_per_s=3000, batch=8)

    server.run(10)

    assert server.run(30).answered / 20 > 0.9 * 1000
    assert 16 < server.limit < 2 * 16 + 8


def test_limit_falls_when_the_server_slows_and_recovers():
    """A server that becomes slow is left with less, and with its own when it is as fast as before."""
    server = Server(about(0.01), 4, rate_per_s=1200)
    before = server.run(15).limit

    server.service = about(0.08)
    assert min(server.run(20).limits) == MIN_LIMIT < before

    server.service = about(0.01)
    server.run(40)
    assert server.run(50).limit == pytest.approx(before, rel=0.4)


def test_server_that_stays_slow_gets_what_it_needs():
    """Slower instances are still as many: what is compared with is measured anew."""
    server = Server(about(0.01), 16, rate_per_s=4000)
    server.run(10)

    server.service = about(0.05)
    server.run(25)

    assert server.run(45).answered / 20 > 0.9 * 16 / 0.05


def test_limit_does_not_grow_without_need():
    """A server that is hardly asked tells nothing of what it could do."""
    server = Server(about(0.01), 4, rate_per_s=20)

    assert max(server.run(60).limits) == INITIAL


def test_different_images_do_not_fool_it():
    """Small images among large ones are no sign of a queue."""
    server = Server(lambda size, chance: chance.choice([0.003, 0.06]), 4, rate_per_s=400)

    assert server.run(60).answered / 60 > 0.94 * 4 / 0.0315


def test_refusals_of_the_server_lower_it():
    """A server that sheds by itself gets less."""
    gradient = ConcurrencyLimit(MOST, 0.0)

    for _ in range(20):
        gradient.dropped()

    assert gradient.limit == MIN_LIMIT
