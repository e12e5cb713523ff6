"""Admission control: which requests may be in flight to the server, in which order, and at what cost."""

import asyncio
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf, sqrt
from statistics import median_high

from nereid.base.processes import available_cores
from nereid.gateway.failures import Failure
from nereid.vision.imaging.formats.image_header import LARGE_COST

# Averaging window, in seconds of time in flight, so that cheap requests cannot hide an expensive one.
AVERAGING_WINDOW_S = 10.0
# A key idle for this many seconds is forgotten and no longer compared with others.
KEY_IDLE_TIMEOUT_S = 60.0
# A request that takes `SLOW_REQUEST_S` can keep a core busy on its own. The remaining time of an abandoned
# request is unknown, so assume `ASSUMED_REMAINING_S`, which one core needs to read a page with the maximum
# number of lines.
SLOW_REQUEST_S, ASSUMED_REMAINING_S = 0.1, 5.0
# Maximum models remembered (v2 callers choose the names), and other keys that a key is compared with.
MAX_MODELS, MAX_OTHERS = 256, 32


@dataclass(slots=True)
class _Mean:
    """Mean seconds per unit of cost, weighted by time in flight.

    Attributes:
        in_flight_s: from admission to response.
        server_time_s: the same, divided by the number of requests in flight.
    """

    in_flight_s: float
    server_time_s: float
    changed_at: float


class UnitLatencies:
    """Mean time in flight per unit of cost, by model and key; pure.

    Args:
        clock: monotonic time in seconds.
        cores: the server's core count; 0 for this machine's.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, cores: int = 0) -> None:
        self._clock, self._half = clock, max(1, (cores or available_cores()) // 2)
        # Models, and the keys of each model, are ordered by last change, newest last.
        self._means: dict[str, dict[str, _Mean]] = {}

    def max_in_flight_of(self, key_id: str, model: str) -> int:
        """Return how many of a key's requests to a model may be in flight, leaving instances for others.

        One until their cost is known; half the cores if they are slow.
        """
        means = self._recent(model)
        if not key_id or not means.keys() - {key_id}:
            return sys.maxsize
        if key_id not in means:
            return 1
        return self._half if self.is_slow(key_id, model) else sys.maxsize

    def is_slow(self, key_id: str, model: str) -> bool:
        """Return whether other keys also use a model and either this key's requests or theirs are slow."""
        means = self._recent(model)
        others = [mean.server_time_s for mean in self._others(key_id, means)]
        server_time_s = means[key_id].server_time_s if key_id in means else 0.0
        return bool(others) and max(server_time_s, median_high(others)) >= SLOW_REQUEST_S

    def is_costly(self, key_id: str, model: str) -> bool:
        """Return whether a key's requests cost as much as large images, whatever they declare."""
        means = self._recent(model)
        mean = means.get(key_id)
        return mean is not None and mean.server_time_s >= LARGE_COST * self._typical_s(key_id, means, mean)

    def expected_s(self, key_id: str, model: str) -> float:
        """Return a key's mean time per unit of cost; 0 if unknown."""
        mean = self._recent(model).get(key_id)
        return mean.in_flight_s if mean else 0.0

    def record(
        self,
        key_id: str,
        model: str,
        seconds: float,
        cost: int,
        in_flight: int = 1,
        is_answered: bool = True,
    ) -> int:
        """Record a request and return the units it cost beyond those it declared.

        Args:
            key_id: the id of its key; empty without a key.
            cost: the units it declared; one unit is a small photo.
            in_flight: the number of requests in flight when it was sent, including itself.
            is_answered: whether it has a result. If not, it says nothing about how long others would take:
                it was refused early, or the server is still working on it.
        """
        if not key_id:
            return 0
        now_s, means = self._clock(), self._recent(model)
        per_unit_s, server_time_s = seconds / cost, seconds / cost / in_flight
        mean = means.pop(key_id, None)
        new_mean = mean or _Mean(per_unit_s, server_time_s, now_s)
        units = server_time_s / self._typical_s(key_id, means, new_mean) * cost
        if is_answered:
            mean = new_mean
        if mean and (is_answered or per_unit_s > mean.in_flight_s):
            weight = seconds / (seconds + AVERAGING_WINDOW_S)
            mean.in_flight_s += weight * (per_unit_s - mean.in_flight_s)
            mean.server_time_s += weight * (server_time_s - mean.server_time_s)
        if mean:
            self._keep(key_id, model, means, mean, now_s)
        return int(units) - cost if units >= LARGE_COST * cost else 0

    def _keep(self, key_id: str, model: str, means: dict[str, _Mean], mean: _Mean, now_s: float) -> None:
        means[key_id], mean.changed_at = mean, now_s
        self._means.pop(model, None)
        self._means[model] = means
        if len(self._means) > MAX_MODELS:
            del self._means[next(iter(self._means))]

    def _recent(self, model: str) -> dict[str, _Mean]:
        """Return the means of the keys that used a model recently, and forget the others."""
        means, oldest_at = self._means.get(model, {}), self._clock() - KEY_IDLE_TIMEOUT_S
        while means and means[oldest := next(iter(means))].changed_at < oldest_at:
            del means[oldest]
        return means

    def _typical_s(self, key_id: str, means: dict[str, _Mean], key_mean: _Mean) -> float:
        """Return the other keys' median, or the only key's mean; but at least what a photo may take."""
        others = [mean.in_flight_s for mean in self._others(key_id, means)]
        return max(SLOW_REQUEST_S / LARGE_COST, median_high(others) if others else key_mean.in_flight_s)

    def _others(self, key_id: str, means: dict[str, _Mean]) -> list[_Mean]:
        recent = islice(reversed(means.items()), MAX_OTHERS)
        return [mean for name, mean in recent if name != key_id]


class FairQueue:
    """A queue that gives all keys equal time, however long their queues or turns are.

    The next turn goes to the key that has used the least time since joining the others. A key leaves one
    turn free if any other key was present in the last `KEY_IDLE_TIMEOUT_S` seconds; a key without a name
    may take all turns.

    Source: start-time fair queueing (Goyal, Vin and Cheng 1996); a turn's duration is known when it ends.

    Args:
        limit: returns the maximum number of concurrent turns.
        clock: monotonic time in seconds.
    """

    def __init__(self, limit: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        # The key seen last, and when; and when any other key was last seen.
        self._newest, self._newest_at, self._others_at = "", -inf, -inf
        # The key that got a turn most recently comes last.
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        self._in_use_by_key = Counter[str]()
        self._used_s = defaultdict[str, float](float)
        self._last_s = defaultdict[str, float](float)
        self._virtual_time_s = 0.0
        self.in_use = 0

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return sum(map(len, self._queues.values()))

    def waiting_before(self, key_id: str) -> int:
        """Estimate how many waiting requests would get their turn before a new request from this key."""
        if not self._queues:
            return 0
        waiting = self.waiting_of(key_id)
        return sum(min(len(queue), waiting + (name != key_id)) for name, queue in self._queues.items())

    def waiting_of(self, key_id: str) -> int:
        """Return how many of a key's requests are waiting."""
        return len(self._queues.get(key_id, ()))

    async def acquire(self, key_id: str, remaining_s: float | None = None) -> None:
        """Wait for a turn and take it; `release` ends it.

        Raises:
            TimeoutError: no turn became free in time.
        """
        if key_id != self._newest:
            self._newest, self._others_at = key_id, self._newest_at
        self._newest_at = self._clock()
        if key_id not in self._queues and not self._in_use_by_key[key_id]:
            self._used_s[key_id] = max(self._used_s[key_id], self._virtual_time_s)
        if not self._queues and self._may_acquire(key_id, self._limit()):
            self._begin(key_id)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key_id, deque()).append(turn)
        self._grant()
        try:
            async with asyncio.timeout(None if turn.done() else remaining_s):
                await turn
        except BaseException:
            self._abandon(key_id, turn)
            raise

    def release(self, key_id: str, seconds: float = 0.0) -> None:
        """End a key's turn that lasted `seconds`, and pass it to the next waiting key."""
        self.in_use -= 1
        self._in_use_by_key[key_id] -= 1
        self._used_s[key_id] += seconds
        self._last_s[key_id] = seconds
        self._forget(key_id)
        if self._queues:
            self._grant()

    def _grant(self) -> None:
        while (key_id := self._next()) is not None:
            queue = self._queues.pop(key_id)
            turn = queue.popleft()
            if queue:
                self._queues[key_id] = queue
            if not turn.done():
                self._begin(key_id)
                turn.set_result(None)

    def _begin(self, key_id: str) -> None:
        self.in_use += 1
        self._in_use_by_key[key_id] += 1
        self._virtual_time_s = max(self._virtual_time_s, self._used_s[key_id])

    def _may_acquire(self, key_id: str, limit: int) -> bool:
        """Return whether a key may take a turn, leaving one free for others if there are any."""
        key_in_use = self._in_use_by_key[key_id]
        return self.in_use < limit and (
            not key_id or key_in_use < max(1, limit - 1) or self._is_alone(key_id)
        )

    def _is_alone(self, key_id: str) -> bool:
        others_at = self._others_at if key_id == self._newest else self._newest_at
        has_others = self.in_use > self._in_use_by_key[key_id] or self._queues.keys() - {key_id}
        return not has_others and self._clock() - others_at > KEY_IDLE_TIMEOUT_S

    def _next(self) -> str | None:
        """Return the key that is next, assuming that unfinished turns last as long as its latest one."""
        limit = self._limit()
        able = (key_id for key_id in self._queues if self._may_acquire(key_id, limit))
        return min(able, key=self._tag_s, default=None)

    def _tag_s(self, key_id: str) -> float:
        return self._used_s[key_id] + self._in_use_by_key[key_id] * self._last_s[key_id]

    def _abandon(self, key_id: str, turn: "asyncio.Future[None]") -> None:
        queue = self._queues.get(key_id, deque())
        if turn in queue:
            queue.remove(turn)
            if not queue:
                del self._queues[key_id]
            self._forget(key_id)
        elif not turn.cancelled():  # it got a turn at the same moment
            self.release(key_id)

    def _forget(self, key_id: str) -> None:
        """Forget a key that has no turn, is not waiting, and has used no more time than others."""
        if (
            not self._in_use_by_key[key_id]
            and key_id not in self._queues
            and self._used_s[key_id] <= self._virtual_time_s
        ):
            for table in (self._in_use_by_key, self._used_s, self._last_s):
                table.pop(key_id, None)


# Enough for two instances with batches of eight, and more than the connections of one browser.
MIN_LIMIT, INITIAL_LIMIT = 16.0, 24.0
TOLERANCE, SMOOTHING = 1.5, 0.5
MIN_WINDOW_S, WINDOW_SAMPLES = 0.1, 10
# At low load, responses are rare, so bound the age of an estimate.
MAX_WINDOW_S = 1.0
PROBE_INTERVAL_S, PROBE_SAMPLES = 10.0, 30
QUIET_SMOOTHING = 0.2
DECREASE_FACTOR = 0.9


class ConcurrencyLimit:
    """An adaptive concurrency limit; pure, because times are arguments.

    Attributes:
        limit: the current limit on requests in flight.
        steady_limit: the same, but not reduced while `limit` is halved for a probe.
        rtt_s: mean round trip of the last window, 0 before the first.

    Args:
        max_limit: upper bound of the limit.
        now_s: monotonic time in seconds.
    """

    def __init__(self, max_limit: int, now_s: float) -> None:
        self._max_limit = float(max_limit)
        self._min_limit = min(MIN_LIMIT, self._max_limit)
        self._limit = min(INITIAL_LIMIT, self._max_limit)
        self._base_s = self.rtt_s = 0.0
        self._probed_at = now_s
        self._open(now_s)

    def _open(self, now_s: float, is_probing: bool = False) -> None:
        self._opened_at, self._is_probing = now_s, is_probing
        # Ignore requests sent before the queue shrank, because they waited in the longer queue.
        self._since = inf if is_probing else -inf
        self._samples = self._peak = 0
        self._sum_s = 0.0
        self._set(self._limit)

    def _set(self, limit: float) -> None:
        self._limit, self.steady_limit = limit, int(limit)
        self.limit = int(max(self._min_limit, limit / 2)) if self._is_probing else self.steady_limit

    def sample(self, rtt_s: float, in_flight: int, now_s: float) -> None:
        """Record a response that took `rtt_s` seconds and left `in_flight` requests in flight."""
        self._peak = max(self._peak, in_flight + 1)
        if in_flight < self.limit:
            self._since = min(self._since, now_s)
        if now_s - rtt_s < self._since:
            return
        self._samples += 1
        self._sum_s += rtt_s
        required_samples = PROBE_SAMPLES if self._is_probing else WINDOW_SAMPLES
        age_s = now_s - self._opened_at
        if age_s >= (MIN_WINDOW_S if self._samples >= required_samples else MAX_WINDOW_S):
            self._close(now_s)

    def record_rejection(self) -> None:
        """Record that the server rejected a request because it was overloaded."""
        self._set(max(self._min_limit, self._limit * DECREASE_FACTOR))

    def _close(self, now_s: float) -> None:
        self.rtt_s = self._sum_s / self._samples
        is_quiet = self._peak <= self._limit / 2
        if self._is_probing or is_quiet:
            weight = 1.0 if self._is_probing or not self._base_s else QUIET_SMOOTHING
            self._base_s += weight * (self.rtt_s - self._base_s)
            self._probed_at = now_s
        elif self._base_s:
            self._update()
        self._open(now_s, is_probing=not is_quiet and self._is_stale(now_s))

    def _is_stale(self, now_s: float) -> bool:
        # At the minimum and still slow, or faster than with half as many: the baseline is wrong.
        is_slower = self._limit <= self._min_limit and self.rtt_s > TOLERANCE * self._base_s
        is_faster = self.rtt_s < self._base_s / TOLERANCE
        return is_slower or is_faster or not self._base_s or now_s - self._probed_at >= PROBE_INTERVAL_S

    def _update(self) -> None:
        gradient = min(1.0, max(0.5, TOLERANCE * self._base_s / self.rtt_s))
        target = self._limit * gradient + sqrt(self._limit) / 2
        limit = self._limit + SMOOTHING * (target - self._limit)
        self._limit = min(self._max_limit, max(self._min_limit, limit))


MAX_RETRY_AFTER_S = 30.0
# Queue length per request in flight, which limits a response to about five round trips.
MAX_WAITING_PER_SLOT = 4
# Maximum waiting large images per key; each can take several seconds.
MAX_LARGE_WAITING = 4
# A large image may take this many times longer than its pixels suggest. A slot is held for at most
# `MAX_LATE_HOLD_S` after its request has left.
LARGE_MARGIN, MAX_LATE_HOLD_S = 4, 10.0


class Admission:
    """Apply an adaptive limit to the requests in flight to the server, and queue the rest.

    A request in this queue can still be cancelled at no cost; in Triton's queue it cannot. Keys take turns.
    Only one large image, or request from keys whose requests take as long, is in flight at a time, which
    leaves the server's other instances to small ones. No key can fill all instances with slow requests.

    Args:
        max_limit: upper bound of the limit.
        clock: monotonic time in seconds.

    Attributes:
        concurrency_limit, unit_latencies: what its slots record.
    """

    def __init__(self, max_limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.concurrency_limit = ConcurrencyLimit(max_limit, clock())
        self._main_queue = FairQueue(lambda: self.concurrency_limit.limit, clock)
        self._large_queue = FairQueue(lambda: 1, clock)
        self.unit_latencies = UnitLatencies(clock)
        # By key and model, while they have requests.
        self._queues_by_key: dict[tuple[str, str], FairQueue] = {}

    @property
    def limit(self) -> int:
        """The current limit on requests in flight."""
        return self.concurrency_limit.limit

    @property
    def in_flight(self) -> int:
        """The number of requests in flight."""
        return self._main_queue.in_use

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        queues = (self._main_queue, self._large_queue, *self._queues_by_key.values())
        return sum(queue.waiting for queue in queues)

    def check(self, remaining_s: float, key_id: str = "") -> None:
        """Reject a request that would wait too long or miss its deadline; does not take a slot.

        Args:
            remaining_s: the time until the request's deadline.
            key_id: the id of its key; empty without a key.

        Raises:
            Failure: `overloaded`, with the time after which a retry makes sense.
        """
        waiting = self._main_queue.waiting_before(key_id)
        if key_id:
            waiting += sum(
                queue.waiting for (name, _), queue in self._queues_by_key.items() if name == key_id
            )
        if waiting >= MAX_WAITING_PER_SLOT * self.concurrency_limit.steady_limit:
            raise Failure(
                "overloaded", f"{waiting} images are in the queue; retry later", self.retry_after_s()
            )
        needed_s = self._needed_s(1, waiting)
        # Always admit one request, so that a wrong estimate gets corrected.
        if self._main_queue.in_use and needed_s > remaining_s:
            raise Failure(
                "overloaded",
                f"a response takes about {needed_s:.2g} s now, but only {remaining_s:.2g} s are left",
                self.retry_after_s(),
            )

    async def acquire(
        self, remaining_s: float, key_id: str = "", costs: Sequence[int] = (1,), model: str = ""
    ) -> "Slot":
        """Wait for a slot and take it.

        Args:
            remaining_s, key_id: as for `check`.
            costs: the cost of each image or tensor, in units of a small photo.
            model: its model; requests to one model take about the same time.

        Raises:
            Failure: as for `check`, or `deadline_exceeded` if no slot became free in time.
        """
        self.check(remaining_s, key_id)
        slot, deadline = Slot(self, key_id, model, sum(costs)), self.clock() + remaining_s
        try:
            is_large = max(costs) >= LARGE_COST
            # Large images wait for each other; while their key's cost is unknown, also for its small ones.
            if key_id and (not is_large or not self.unit_latencies.expected_s(key_id, model)):
                queue = self._queue_of(key_id, model)
                if is_large:
                    self._check_large(queue.waiting)
                await slot.wait(queue, "", remaining_s)
            if is_large or (key_id and self.unit_latencies.is_costly(key_id, model)):
                self._check_large(self._large_queue.waiting_of(key_id))
                slot.is_large = True
                await slot.wait(self._large_queue, key_id, max(0.0, deadline - self.clock()))
            await slot.wait(self._main_queue, key_id, max(0.0, deadline - self.clock()))
        except BaseException as error:
            slot.release()
            if not isinstance(error, TimeoutError):
                raise
            text = f"no slot became free within {remaining_s:.3g} s"
            raise Failure("deadline_exceeded", text) from None
        slot.begin()
        return slot

    def _check_large(self, waiting: int) -> None:
        if waiting >= MAX_LARGE_WAITING:
            raise Failure(
                "overloaded",
                f"{waiting} large images of this key are in the queue; retry later",
                self.retry_after_s(),
            )

    def _queue_of(self, key_id: str, model: str) -> FairQueue:
        if (key_id, model) not in self._queues_by_key:
            limit = partial(self.unit_latencies.max_in_flight_of, key_id, model)
            self._queues_by_key[key_id, model] = FairQueue(limit, self.clock)
        return self._queues_by_key[key_id, model]

    def forget(self, key_id: str, model: str) -> None:
        """Forget the queue of a key and model that have no requests."""
        queue = self._queues_by_key.get((key_id, model))
        if queue and not queue.in_use and not queue.waiting:
            del self._queues_by_key[key_id, model]

    def retry_after_s(self) -> float:
        """Return the estimated time to finish all requests in flight and in the queue, at the recent rate."""
        return min(MAX_RETRY_AFTER_S, self._needed_s(self._main_queue.in_use / self.limit, self.waiting))

    def _needed_s(self, round_trips: float, waiting: int) -> float:
        """Return how long a queue and a number of additional round trips take."""
        return self.concurrency_limit.rtt_s * (round_trips + waiting / self.concurrency_limit.limit)


class Slot:
    """The slot of one request in flight; released exactly once.

    Attributes:
        is_large: whether it is in the large-image lane.
    """

    def __init__(self, admission: Admission, key_id: str, model: str, cost: int) -> None:
        self._admission = admission
        self._key_id = key_id
        self._model = model
        self._cost = cost
        self._started_at, self._in_flight = inf, 1
        self._acquired: list[tuple[FairQueue, str]] = []
        self.is_large = False

    async def wait(self, queue: FairQueue, key_id: str, remaining_s: float) -> None:
        """Wait for a turn, which the slot then holds."""
        await queue.acquire(key_id, remaining_s)
        self._acquired.append((queue, key_id))

    def begin(self) -> None:
        """Mark the request as in flight from now on."""
        self._started_at, self._in_flight = self._admission.clock(), self._admission.in_flight

    def measure(self, is_answered: bool) -> int:
        """Record the request's time in flight and return the units it cost beyond those it declared."""
        if not (key_id := self._key_id):
            return 0
        unit_latencies = self._admission.unit_latencies
        seconds = self._in_flight_s()
        return unit_latencies.record(key_id, self._model, seconds, self._cost, self._in_flight, is_answered)

    def release_answered(self) -> None:
        """Release the slot after a correct response, and record its round trip unless the image is large."""
        admission, now_s = self._admission, self._admission.clock()
        if not self.is_large and self._cost == 1:
            admission.concurrency_limit.sample(now_s - self._started_at, admission.in_flight - 1, now_s)
        self.release()

    def release_rejected(self) -> None:
        """Release the slot after the server reported overload, and lower the limit."""
        self._admission.concurrency_limit.record_rejection()
        self.release()

    def release(self) -> None:
        """Release the slot without recording a sample, even if it is still waiting."""
        while self._acquired:
            queue, key_id = self._acquired.pop()
            queue.release(key_id, self._in_flight_s())
        if self._key_id:
            self._admission.forget(self._key_id, self._model)

    def abandoned_work_s(self) -> float:
        """Estimate how much longer the server works on a request whose caller has left.

        The server finishes a dispatched request without reporting it. The estimate is the key's mean time for
        each unit declared, four times that for a large image. A large image, or a request of a key whose
        requests are limited, takes at least `ASSUMED_REMAINING_S`; if it takes longer, it may take as long
        again.
        """
        admission, spent_s = self._admission, self._in_flight_s()
        unit_latencies = admission.unit_latencies
        per_unit_s = max(
            admission.concurrency_limit.rtt_s, unit_latencies.expected_s(self._key_id, self._model)
        )
        remaining_s = per_unit_s * self._cost * (LARGE_MARGIN if self.is_large else 1) - spent_s
        if self.is_large or unit_latencies.max_in_flight_of(self._key_id, self._model) < sys.maxsize:
            remaining_s = max(remaining_s, ASSUMED_REMAINING_S - spent_s, spent_s)
        return max(0.0, min(remaining_s, MAX_LATE_HOLD_S))

    def _in_flight_s(self) -> float:
        return max(0.0, self._admission.clock() - self._started_at)
