"""The requests of one route: admission, variant, breaker, retry, deadline, shadows. Knows no Triton."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import random
from threading import Lock
from typing import Any

from nereid.routing.assignment import (
    BREAKER,
    FORCED,
    RETRY,
    ROUTE_KEY,
    BreakerSettings,
    Choice,
    Table,
    Variant,
    choose,
    lower,
)
from nereid.routing.attempts import MOST_LATE, BoundedLabels, Counts, Exchange
from nereid.routing.breaker import Breaker, RetryBudget, State
from nereid.routing.shadows import Answered, Shadows
from nereid.serving_errors import (
    Cancelled,
    DeadlineExceeded,
    Died,
    InvalidRequest,
    Overloaded,
    ServingError,
    Unavailable,
    from_exception,
)

# A request that waited longer for its thread is not sent on before a look whether its client is still there.
UNNOTICED_S = 0.005
# Nor is a call that took longer than most answered without one.
LONG_S = 0.2
HURRY_S = 1.0


@dataclass(slots=True)
class Ticket:
    """A request that was let in: the table that serves it, since when, and whether it has its place."""

    exchange: Exchange
    table: Table
    begin: float
    has_place: bool = True


class Router:
    """Routes requests, each in a thread of its own; safe to use from all of them.

    Args:
        table: the route to begin with.
        counts: where is counted.
        log: takes a line about a breaker that opens or closes, or a shadow that fails.
        clock: seconds that never go back.
        draw: random numbers in [0, 1).
    """

    def __init__(
        self,
        table: Table,
        counts: Counts,
        log: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random,
    ) -> None:
        self._counts, self._log, self._clock, self._draw = counts, log, clock, draw
        self._lock = Lock()
        self._table = table
        self._lanes: dict[_Identity, _Lane] = {}
        self._calls: Counter[tuple[str, ...]] = Counter()
        self._label = BoundedLabels()
        self._flights: set[_Flight] = set()
        self._in_flight = 0
        self._budget = RetryBudget()
        self._shadows = Shadows(counts, log, clock, draw)

    def use(self, table: Table) -> None:
        """Serve by `table` from the next request on; those in flight keep theirs."""
        kept = {_identity(table, variant) for variant in table.route.variants}
        with self._lock:
            for key in self._lanes.keys() - kept:
                self._lanes.pop(key).retire()
            self._table = table

    def admit(self, exchange: Exchange) -> Ticket | None:
        """Let a request in, or refuse it because too many are in flight; one let in must be handled."""
        table = self._table
        with self._lock:
            in_flight = self._in_flight
            if in_flight < table.route.max_in_flight:
                self._in_flight += 1
                return Ticket(exchange, table, self._clock())
        self._counts.add("shed_total")
        exchange.refuse(Overloaded(f"{in_flight} in flight, limit {table.route.max_in_flight}"))
        return None

    def handle(self, ticket: Ticket) -> None:
        """Answer a request that was let in, then mirror it to the shadows it is meant for."""
        exchange, route = ticket.exchange, ticket.table.route
        try:
            try:
                parameters = lower(exchange.parameters())
                flight, response = self._carry(ticket, self._choose(ticket, parameters))
            finally:
                # Before the answer: its client may send the next one at once.
                self._leave(ticket)
        except _TooLate:
            return
        except Exception as error:
            exchange.refuse(from_exception(error))
            return
        if flight.seconds > LONG_S and exchange.is_cancelled():
            self._counts.add("cancelled_total")
        try:
            exchange.answer(response, flight.variant.name, flight.network_version, flight.reason)
        except Exception as error:  # an answer that cannot be built must not leave its client waiting
            exchange.refuse(from_exception(error))
            return
        if route.shadows:
            key = parameters.get(ROUTE_KEY, "")
            answered = Answered(exchange, route, flight.variant, response, flight.seconds, key)
            self._shadows.mirror(answered, lambda: self._in_flight)

    def expire(self) -> None:
        """Refuse the requests that are past their deadline; what was called for them goes on."""
        now = self._clock()
        with self._lock:
            late = [flight for flight in self._flights if now >= flight.deadline]
        for flight in late:
            waited_ms = (now - flight.ticket.begin) * 1e3
            error = DeadlineExceeded(
                f"variant '{flight.variant.name}' has not answered in {waited_ms:.0f} ms"
            )
            if self._end(flight, error, is_late=True):
                self._leave(flight.ticket)
                flight.ticket.exchange.refuse(error)
        self._shadows.expire()

    def _leave(self, ticket: Ticket) -> None:
        with self._lock:
            self._in_flight -= ticket.has_place
            ticket.has_place = False

    def _choose(self, ticket: Ticket, parameters: Mapping[str, str]) -> Choice:
        if self._clock() - ticket.begin > UNNOTICED_S:
            self._check_client(ticket)
        try:
            return choose(ticket.table, parameters, self._draw())
        except ServingError as error:
            self._count("", "", error.outcome, "")
            raise

    def _carry(self, ticket: Ticket, choice: Choice) -> tuple["_Flight", Any]:
        """Call the chosen variant; if it cannot be reached, perhaps the default one."""
        flight = self._begin(ticket, choice)
        try:
            return flight, self._call(flight)
        except Unavailable as error:
            # What was under way when its process died may be what killed it.
            may_have_run = isinstance(error, Died) and not flight.was_dead
            if may_have_run or not self._may_retry(flight):
                raise
        flight = self._begin(ticket, Choice(ticket.table.route.default_variant, RETRY))
        return flight, self._call(flight)

    def _may_retry(self, flight: "_Flight") -> bool:
        """Tell whether a request that has not reached its variant may go to the default one instead."""
        if flight.reason in FORCED or flight.variant is flight.ticket.table.route.default_variant:
            return False
        with self._lock:
            may_retry = self._budget.may_retry()
        if may_retry:
            self._check_client(flight.ticket)
        return may_retry

    def _check_client(self, ticket: Ticket) -> None:
        if ticket.exchange.is_cancelled():
            self._counts.add("cancelled_total")
            raise Cancelled("the client has left")

    def _begin(self, ticket: Ticket, choice: Choice) -> "_Flight":
        """Open a flight of the chosen variant, or of the default one if that is failing."""
        route, now = ticket.table.route, self._clock()
        options = [choice]
        if choice.reason not in FORCED and choice.variant is not route.default_variant:
            options.append(Choice(route.default_variant, BREAKER))
        with self._lock:
            for option in options:
                lane = self._lane(ticket.table, option.variant)
                if lane.allows(now):
                    flight = _Flight(ticket, option, lane)
                    self._flights.add(flight)
                    self._count_calls(lane, 1)
                    return flight
            self._count(**lane.labels, outcome="unavailable", reason=choice.reason)
        names = " and ".join(f"'{option.variant.name}'" for option in options)
        raise Unavailable(f"variant {names} failing, tried again every {route.breaker.open_s:g} s")

    def _call(self, flight: "_Flight") -> Any:
        variant, exchange = flight.variant, flight.ticket.exchange
        response, error = None, None
        try:
            remaining_s = max(flight.deadline - self._clock(), 1e-6)
            response = exchange.call(variant.model, variant.version, remaining_s)
        except Exception as raised:
            error = from_exception(raised)
        is_late = not self._end(flight, error)
        with self._lock:
            self._count_calls(flight.lane, -1)
            flight.lane.late -= is_late
        if is_late:
            self._counts.add("late_total", **flight.lane.labels)
            raise _TooLate
        if error:
            raise error
        return response

    def _end(self, flight: "_Flight", error: ServingError | None, is_late: bool = False) -> bool:
        """Take note of how a flight ended; returns False if that was known before."""
        now = self._clock()
        with self._lock:
            if flight not in self._flights:
                return False
            self._flights.remove(flight)
            flight.lane.record(flight, error, now)
            flight.lane.late += is_late
            if isinstance(error, Died):
                self._hurry(flight.lane, now)
            if error is None:
                self._budget.succeeded()
        flight.seconds = now - flight.ticket.begin
        outcome = error.outcome if error else "ok"
        self._count(**flight.lane.labels, outcome=outcome, reason=flight.reason)
        self._counts.add("request_duration_seconds", flight.seconds, outcome=outcome, **flight.lane.labels)
        return True

    def _hurry(self, lane: "_Lane", now: float) -> None:
        """Do not wait long for the other calls of a variant one of whose processes has died.

        Triton 24.10 takes a second for each request in such a process's queue, one after the other.
        """
        for flight in self._flights:
            if flight.lane is lane:
                flight.deadline = min(flight.deadline, now + HURRY_S)

    def _count_calls(self, lane: "_Lane", change: int) -> None:
        # By label: a variant that has changed and the one before are shown as one.
        lane.calls += change
        key = tuple(lane.labels.values())
        self._calls[key] += change
        self._counts.set("in_flight", self._calls[key], **lane.labels)

    def _count(self, variant: str, version: str, outcome: str, reason: str) -> None:
        self._counts.add("requests_total", variant=variant, version=version, outcome=outcome, reason=reason)

    def _lane(self, table: Table, variant: Variant) -> "_Lane":
        key = _identity(table, variant)
        if key not in self._lanes:
            name, version = self._label(variant.name, table.network_versions[variant.name])
            self._lanes[key] = _Lane(table.route.breaker, name, version, self._counts, self._log)
        return self._lanes[key]


class _TooLate(Exception):
    """The variant answered after the deadline, when the client had been told."""


class _Lane:
    """A variant as long as the route has it: its breaker, which a gauge shows, and its labels."""

    def __init__(
        self,
        settings: BreakerSettings,
        variant: str,
        version: str,
        counts: Counts,
        log: Callable[[str], None],
    ) -> None:
        self.labels: Mapping[str, str] = {"variant": variant, "version": version}
        self._counts, self._log = counts, log
        self._shown = State.CLOSED
        self._is_retired = False
        self.calls = self.late = 0
        self.is_dead = False
        self.breaker = Breaker(settings, self._show)
        self._counts.set("breaker_state", State.CLOSED, **self.labels)

    def allows(self, now: float) -> bool:
        """Tell whether a request may go; none does behind those that a dead process's queue still holds."""
        is_held_up = self.calls > 0 if self.is_dead else self.late >= MOST_LATE
        return not is_held_up and self.breaker.allows(now)

    def record(self, flight: "_Flight", error: ServingError | None, now: float) -> None:
        """Take note of how a call ended for its client."""
        if isinstance(error, Unavailable):
            self.breaker.trip(now)
        else:
            self.breaker.record(flight.blames_variant(error), now, flight.is_trial)
        if error is None or isinstance(error, Died):
            self.is_dead = error is not None

    def retire(self) -> None:
        """Show no breaker any more, though requests may still be in flight."""
        self._show(State.CLOSED)
        self._is_retired = True

    def _show(self, state: State) -> None:
        if self._is_retired or state is self._shown:
            return
        self._counts.set("breaker_state", state, **self.labels)
        self._shown = state
        if state is not State.HALF_OPEN:
            self._log(f"variant '{self.labels['variant']}': breaker {state.name.lower()}")


class _Flight:
    """One call of a variant."""

    def __init__(self, ticket: Ticket, choice: Choice, lane: _Lane) -> None:
        self.ticket, self.variant, self.reason, self.lane = ticket, choice.variant, choice.reason, lane
        # Of a breaker that is half open, only the request that tries is let through.
        self.is_trial = lane.breaker.state is State.HALF_OPEN
        self.was_dead = lane.is_dead
        own_s, asked_s = choice.variant.deadline_ms / 1e3, ticket.exchange.timeout_s
        self._is_own_deadline = not 0 < asked_s < own_s
        self.deadline = ticket.begin + (own_s if self._is_own_deadline else asked_s)
        self.seconds = 0.0

    @property
    def network_version(self) -> str:
        """What callers know as the model version."""
        return self.ticket.table.network_versions[self.variant.name]

    def blames_variant(self, error: ServingError | None) -> bool | None:
        """Tell whether the outcome is the variant's fault; None if it says nothing about the variant."""
        if error is None:
            return False
        if isinstance(error, (InvalidRequest, Overloaded, Cancelled)):
            return None
        if isinstance(error, DeadlineExceeded):
            return True if self._is_own_deadline else None
        return True


_Identity = tuple[str, str, int, BreakerSettings]


def _identity(table: Table, variant: Variant) -> _Identity:
    return variant.name, variant.model, variant.version, table.route.breaker
