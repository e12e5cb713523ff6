"""Attempts of a route: admitted requests, one attempt on a variant, its state and its circuit breaker."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from math import inf
from threading import Lock

from nereid.backends.routing.assignment import (
    BREAKER,
    FORCED,
    MAX_IN_FLIGHT,
    RETRY,
    BreakerSettings,
    LoadedRoute,
    Route,
    Variant,
    VariantChoice,
)
from nereid.backends.routing.interfaces import (
    MAX_LATE,
    BoundedLabels,
    MetricSink,
    RequestTrace,
    RoutedRequest,
)
from nereid.base.errors import DeadlineExceeded, ServingError, StubDied, Unavailable, is_fault


class BreakerState(IntEnum):
    """State of a breaker: it lets all requests pass, one trial, or none."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Keeps requests away from a variant whose last requests failed.

    It considers the requests of the last `window_s` seconds, at least the last `min_requests`. It opens when
    at least `error_ratio` of them failed, or immediately when it is tripped. After `open_s` one trial request
    passes, whose outcome closes or opens the breaker again. `on_change` receives each new state.
    Not thread-safe: the caller holds a lock.
    """

    def __init__(
        self, settings: BreakerSettings, on_change: Callable[[BreakerState], None] = lambda state: None
    ) -> None:
        self.state = BreakerState.CLOSED
        self._settings, self._on_change = settings, on_change
        self._outcomes: deque[tuple[float, bool]] = deque()
        self._failures = 0
        self._changed_at = 0.0
        self._is_trying = False

    def allows(self, now: float) -> bool:
        """Return whether a request may pass; a half-open breaker lets one trial request pass."""
        if self.state is BreakerState.OPEN and now - self._changed_at >= self._settings.open_s:
            self._change(BreakerState.HALF_OPEN, now)
        if self.state is BreakerState.HALF_OPEN and not self._is_trying:
            self._is_trying = True
            return True
        return self.state is BreakerState.CLOSED

    def record(self, has_failed: bool | None, now: float, is_trial: bool = False) -> None:
        """Record the outcome of an allowed request; None if it says nothing about the variant.

        While the breaker is half open, only the trial counts, not earlier requests.
        """
        if is_trial and self.state is BreakerState.HALF_OPEN:
            self._is_trying = False
            if has_failed is not None:
                self._change(BreakerState.OPEN if has_failed else BreakerState.CLOSED, now)
        elif self.state is BreakerState.CLOSED and has_failed is not None:
            self._outcomes.append((now, has_failed))
            self._failures += has_failed
            self._forget(now)
            if self._must_open():
                self._change(BreakerState.OPEN, now)

    def allow_trial(self, now: float) -> None:
        """Let the next request through as a trial, without the rest of the wait."""
        if self.state is BreakerState.OPEN:
            self._change(BreakerState.HALF_OPEN, now)

    def trip(self, now: float) -> None:
        """Open immediately, or stay open: the variant is unreachable."""
        if self.state is not BreakerState.OPEN:
            self._change(BreakerState.OPEN, now)

    def _must_open(self) -> bool:
        count = len(self._outcomes)
        return count >= self._settings.min_requests and self._failures / count >= self._settings.error_ratio

    def _forget(self, now: float) -> None:
        oldest_kept = now - self._settings.window_s
        while len(self._outcomes) > self._settings.min_requests and self._outcomes[0][0] < oldest_kept:
            self._failures -= self._outcomes.popleft()[1]

    def _change(self, state: BreakerState, now: float) -> None:
        self.state = state
        self._changed_at = now
        self._is_trying = False
        self._outcomes.clear()
        self._failures = 0
        self._on_change(state)


# A death seen longer ago than this says nothing about the instance's current process.
DEATH_COUNTS_S = 10.0
# A request is sent to at most this many dead instances while no other one responds, or if it has a fallback.
# Each costs a second in Triton 24.10, and the supervisor needs one or two, on a busy machine four, to replace
# them.
MAX_DEATHS = 3
# In `DEATH_COUNTS_S`, this many requests that may have killed an instance are sent to another one: as many as
# wait for one process.
MAX_SUSPECTS = MAX_IN_FLIGHT
MAX_WAIT_FOR_DEAD_S = 1.0
# Attempts that continue without a client. Each occupies a thread, like the late ones: see ROUTE_THREADS.
MAX_ABANDONED = MAX_IN_FLIGHT // 2
# Key of a breaker's state: name, model and version of the variant, and the breaker's settings.
BreakerKey = tuple[str, str, int, BreakerSettings]


def breaker_key(loaded: LoadedRoute, variant: Variant) -> BreakerKey:
    """Return the key under which the state of a variant outlives a change of the route."""
    return variant.name, variant.model, variant.version, loaded.route.breaker


@dataclass(slots=True)
class AdmittedRequest:
    """A request, and what is known about it.

    Attributes:
        loaded: the route that serves it.
        arrived_at: its arrival, in seconds.
        has_slot: whether it occupies a slot.
        deaths: how often it was sent to a dead instance.
        trace: the spans of the request.
        key: its sticky key, or an empty string.
        is_suspect: whether an instance died while it had the request.
        is_abandoned: whether an attempt continues although its client has disconnected.
        response_lock: lock that the response waits for while another thread uses the request.
    """

    request: RoutedRequest
    loaded: LoadedRoute
    arrived_at: float
    trace: RequestTrace
    key: str = ""
    has_slot: bool = True
    deaths: int = 0
    is_suspect: bool = False
    is_abandoned: bool = False
    response_lock: Lock = field(default_factory=Lock)

    def reject(self, error: ServingError) -> None:
        """Send an error to the client, and end the trace with it."""
        self.request.reject(error)
        self.trace.end(error)


class VariantHealth:
    """State of a variant while the route has it: breaker, labels, attempts in flight and late ones."""

    def __init__(
        self,
        settings: BreakerSettings,
        variant: str,
        version: str,
        metrics: MetricSink,
        log: Callable[[str], None],
    ) -> None:
        self.labels: Mapping[str, str] = {"variant": variant, "version": version}
        self._metrics, self._log = metrics, log
        self._shown = BreakerState.CLOSED
        self._is_retired = False
        self.in_flight = self.late = self.late_large = 0
        self.is_dead = False
        # When it last responded, in seconds, even if too late.
        self.responded_at = -inf
        # When each instance was seen dead, in seconds.
        self._deaths: dict[str, float] = {}
        self._suspects: deque[float] = deque()
        self.breaker = Breaker(settings, self._show)
        self._metrics.set("breaker_state", BreakerState.CLOSED, **self.labels)

    def allows(self, now: float) -> bool:
        """Return whether an attempt may start; none may queue behind a dead process's."""
        is_blocked = self.in_flight > 0 if self.is_dead else self.late >= MAX_LATE
        return not is_blocked and self.breaker.allows(now)

    def record(self, attempt: "Attempt", error: ServingError | None, now: float) -> None:
        """Record how an attempt ended for its client."""
        if isinstance(error, StubDied) and attempt.has_live_instance:
            self.breaker.record(None, now, attempt.is_trial)
            return
        if isinstance(error, Unavailable):
            self.breaker.trip(now)
        else:
            self.breaker.record(attempt.blames_variant(error), now, attempt.is_trial)
        if error is None or isinstance(error, StubDied):
            self.is_dead = error is not None

    def count_late(self, attempt: "Attempt", change: int) -> None:
        """Count attempts that continue past their deadline or, with a negative `change`, have returned."""
        if change:
            self.late += change
            self.late_large += change * attempt.is_large

    def note_death(self, instance: str, now: float) -> None:
        """Record that an instance is dead."""
        if now - self._deaths.get(instance, -inf) > DEATH_COUNTS_S:
            self._deaths[instance] = now

    @property
    def dead_instances(self) -> list[str]:
        """The instances that were seen dead, replaced or not."""
        return list(self._deaths)

    def may_try_again(self, attempt: "Attempt", instance: str, now: float) -> bool:
        """Return whether to send a request to another instance, because this one was dead."""
        admitted = attempt.admitted
        admitted.deaths += 1
        if admitted.deaths > MAX_DEATHS:
            if is_silent := self.responded_at < admitted.arrived_at:
                self.breaker.trip(now)
            if is_silent or (attempt.has_fallbacks and attempt.plan.has_choices):
                return False
        if now >= attempt.deadline:
            return False
        return not self.could_have_received(attempt, instance) or self.may_send_suspect(admitted, now)

    def could_have_received(self, attempt: "Attempt", instance: str = "") -> bool:
        """Return whether an instance, or any one, could have received a request before it died.

        An instance gets none after it was seen dead.
        """
        seen = self._deaths.get(instance, max(self._deaths.values(), default=inf))
        return attempt.started_at <= seen

    def may_send_suspect(self, admitted: AdmittedRequest, now: float) -> bool:
        """Return whether a request that may have killed an instance may be sent to another one.

        Such a request is sent again only once, and only a few are.
        """
        while self._suspects and now - self._suspects[0] > DEATH_COUNTS_S:
            self._suspects.popleft()
        if admitted.is_suspect or len(self._suspects) >= MAX_SUSPECTS:
            return False
        admitted.is_suspect = True
        self._suspects.append(now)
        return True

    def revive(self, now: float) -> None:
        """Let a trial through: the dead instance was replaced."""
        self.is_dead = False
        self.breaker.allow_trial(now)

    def retire(self) -> None:
        """Stop showing the breaker, even if attempts are still in flight."""
        self._show(BreakerState.CLOSED)
        self._is_retired = True

    def _show(self, state: BreakerState) -> None:
        if self._is_retired or state is self._shown:
            return
        self._metrics.set("breaker_state", state, **self.labels)
        self._shown = state
        if state is not BreakerState.HALF_OPEN:
            self._log(f"variant '{self.labels['variant']}': breaker {state.name.lower()}")


class VariantHealthRegistry:
    """The states of the variants in use; not thread-safe."""

    def __init__(self, metrics: MetricSink, log: Callable[[str], None]) -> None:
        self._metrics, self._log = metrics, log
        self._label = BoundedLabels()
        self._states: dict[BreakerKey, VariantHealth] = {}
        # By labels: changing a variant does not change its series.
        self._in_flight: Counter[tuple[str, ...]] = Counter()

    def __iter__(self) -> Iterator[VariantHealth]:
        return iter(self._states.values())

    def of(self, loaded: LoadedRoute, variant: Variant) -> VariantHealth:
        """Return the state of a variant of a route."""
        key = breaker_key(loaded, variant)
        if key not in self._states:
            name, version = self._label(variant.name, loaded.network_versions[variant.name])
            self._states[key] = VariantHealth(loaded.route.breaker, name, version, self._metrics, self._log)
        return self._states[key]

    def count_in_flight(self, health: VariantHealth, change: int) -> None:
        """Count attempts that begin or, with a negative `change`, have returned."""
        health.in_flight += change
        key = tuple(health.labels.values())
        self._in_flight[key] += change
        self._metrics.set("in_flight", self._in_flight[key], **health.labels)

    def keep_only(self, loaded: LoadedRoute) -> None:
        """Retire the states of variants that a route does not have."""
        for key in self._states.keys() - {breaker_key(loaded, variant) for variant in loaded.route.variants}:
            self._states.pop(key).retire()


class AttemptPlan:
    """The chosen variant, then those that replace it; each is tried at most once.

    Attributes:
        first, first_label: the choice, and the label of its variant in metrics.
        is_forced: whether the request names its variant, so that no other may respond.
    """

    def __init__(self, route: Route, first: VariantChoice) -> None:
        self.first, self.first_label = first, first.variant.name
        self._repeated: VariantChoice | None = None
        self.is_forced = first.reason in FORCED
        rest = () if self.is_forced else route.replacements
        self._left = [first, *(VariantChoice(other, BREAKER) for other in rest if other is not first.variant)]

    @property
    def has_choices(self) -> bool:
        """Whether a variant is left to try."""
        return bool(self._left)

    def next(self) -> VariantChoice:
        """Return the next choice, and remove it."""
        return self._left.pop(0)

    def repeat(self, choice: VariantChoice) -> None:
        """Try a choice again before all others, because another instance of its model runs."""
        self._left.insert(0, choice)
        self._repeated = choice

    def has_alternative_to(self, choice: VariantChoice) -> bool:
        """Return whether a choice is repeated and others remain if it takes too long."""
        return choice is self._repeated and self.has_choices

    def mark_rest_as_retries(self) -> None:
        """Note that a variant was tried: the remaining ones are retries."""
        self._left = [VariantChoice(choice.variant, RETRY) for choice in self._left]


class Attempt:
    """One attempt to serve a request by a variant.

    `is_queued_on_dead_stub` says whether it is in the queue of a process that has since died.
    """

    def __init__(
        self,
        admitted: AdmittedRequest,
        plan: AttemptPlan,
        choice: VariantChoice,
        health: VariantHealth,
        now: float,
    ) -> None:
        self.plan = plan
        self.admitted, self.health = admitted, health
        self.variant, self.reason = choice.variant, choice.reason
        # A half-open breaker lets only the trial through.
        self.is_trial = health.breaker.state is BreakerState.HALF_OPEN
        self.was_dead = health.is_dead
        self.has_live_instance = False
        self.is_queued_on_dead_stub = False
        self.started_at = now
        own_s, client_s = choice.variant.deadline_ms / 1e3, admitted.request.timeout_s
        self._is_own_deadline = not 0 < client_s < own_s
        self.deadline = admitted.arrived_at + (own_s if self._is_own_deadline else client_s)
        self.seconds = 0.0
        if admitted.loaded.route.has_fallbacks and plan.has_alternative_to(choice):
            # The other instance may still be starting, and the queue may still belong to the dead one.
            shorten_deadlines((self,), health, now)

    @property
    def is_chosen(self) -> bool:
        """Whether its variant is the chosen one, not a replacement."""
        return self.reason not in (BREAKER, RETRY)

    @cached_property
    def is_large(self) -> bool:
        """Whether an image of the request is large; first read before the request gets its response."""
        return self.admitted.request.is_large()

    @property
    def has_fallbacks(self) -> bool:
        """Whether its route has variants or an answer that replace the default."""
        return self.admitted.loaded.route.has_fallbacks

    @property
    def network_version(self) -> str:
        """The model version that clients see."""
        return self.admitted.loaded.network_versions[self.variant.name]

    def blames_variant(self, error: ServingError | None) -> bool | None:
        """Return whether the variant is at fault; None if the outcome says nothing about it."""
        if error is None:
            return False
        if not is_fault(error):
            return None
        if isinstance(error, DeadlineExceeded):
            # A variant that responded to others meanwhile is merely overloaded, as is one with large images.
            is_silent = self.health.responded_at < self.started_at
            is_blamed = self._is_own_deadline and is_silent and not self.health.late_large
            return True if is_blamed and not self.is_large else None
        return True


def shorten_deadlines(attempts: Iterable[Attempt], health: VariantHealth, now: float) -> None:
    """Shorten the deadlines of the other attempts on a variant after one of its processes has died.

    Triton 24.10 spends a second on each request in such a process's queue, one after the other.
    """
    for attempt in attempts:
        if attempt.health is health:
            shortened = now + MAX_WAIT_FOR_DEAD_S
            if shortened < attempt.deadline:
                attempt.deadline, attempt.is_queued_on_dead_stub = shortened, True
