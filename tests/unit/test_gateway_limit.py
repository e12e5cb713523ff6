"""The adaptive limit in front of a simulated server: instances with a queue, open-loop arrivals."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from nereid.gateway.admission import INITIAL_LIMIT, MIN_LIMIT, ConcurrencyLimit

Service = Callable[[int, random.Random], float]


@dataclass
class Server:
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
        self.concurrency_limit = ConcurrencyLimit(64, 0.0)
        self.idle = self.instances
        self._push(0.0, [])

    def run(self, until_s: float) -> "Server":
        """Simulate until a time; an event without requests is the next arrival."""
        self.answered, self.limits = 0, []
        while self.events[0][0] < until_s:
            self.now_s, _, done = heapq.heappop(self.events)
            if done:
                self._answer(done)
            else:
                self._push(self.now_s + self.chance.expovariate(self.rate_per_s), [])
                if self.in_flight < self.concurrency_limit.limit:
                    self.in_flight += 1
                    self.waiting.append(self.now_s)
            self._dispatch()
        return self

    @property
    def limit(self) -> float:
        return sum(self.limits) / len(self.limits)

    def _answer(self, done: list[float]) -> None:
        self.idle += 1
        for arrived_s in done:
            self.in_flight -= 1
            self.answered += 1
            self.concurrency_limit.sample(self.now_s - arrived_s, self.in_flight, self.now_s)
            self.limits.append(self.concurrency_limit.limit)

    def _dispatch(self) -> None:
        while self.waiting and self.idle:
            batch, self.waiting = self.waiting[: self.batch], self.waiting[self.batch :]
            self.idle -= 1
            self._push(self.now_s + self.service(len(batch), self.chance), batch)

    def _push(self, at_s: float, done: list[float]) -> None:
        heapq.heappush(self.events, (at_s, self.chance.getrandbits(60), done))


def about(mean_s: float) -> Service:
    return lambda size, chance: chance.gammavariate(4, mean_s / 4)


@pytest.mark.parametrize("instances", [2, 4, 16])
def test_limit_finds_the_knee_and_stays_there(instances):
    """At three times the capacity the limit is below twice the knee, and the server stays busy."""
    server = Server(about(0.02), instances, rate_per_s=150 * instances)

    first, last = server.run(10).limit, server.run(60)

    assert max(first, last.limit) < 2 * max(instances, MIN_LIMIT)
    assert last.limit > instances
    assert last.answered / 50 > 0.96 * 50 * instances


def test_batches_raise_the_limit():
    server = Server(lambda size, chance: 0.008 + 0.001 * size, 2, rate_per_s=3000, batch=8)

    server.run(10)

    assert server.run(30).answered / 20 > 0.9 * 1000
    assert 16 < server.limit < 2 * 16 + 8


def test_limit_falls_when_the_server_slows_and_recovers():
    server = Server(about(0.01), 4, rate_per_s=1200)
    before = server.run(15).limit

    server.service = about(0.08)
    assert min(server.run(20).limits) == MIN_LIMIT < before

    server.service = about(0.01)
    server.run(40)
    assert server.run(50).limit == pytest.approx(before, rel=0.4)


def test_limit_recovers_for_a_permanently_slow_server():
    server = Server(about(0.01), 16, rate_per_s=4000)
    server.run(10)

    server.service = about(0.05)
    server.run(25)

    assert server.run(45).answered / 20 > 0.9 * 16 / 0.05


def test_limit_does_not_grow_without_need():
    assert max(Server(about(0.01), 4, rate_per_s=20).run(60).limits) == INITIAL_LIMIT


def test_different_images_do_not_lower_the_limit():
    server = Server(lambda size, chance: chance.choice([0.003, 0.06]), 4, rate_per_s=400)

    assert server.run(60).answered / 60 > 0.94 * 4 / 0.0315
