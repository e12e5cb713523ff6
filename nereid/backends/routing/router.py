"""Requests of one route: admission, variant, breaker, retry, deadline, shadows. Independent of Triton."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from random import random
from threading import Lock
from typing import Any

from nereid.backends.routing import assignment
from nereid.backends.routing.assignment import ANSWER, LoadedRoute, VariantChoice, lower
from nereid.backends.routing.attempts import (
    MAX_ABANDONED,
    AdmittedRequest,
    Attempt,
    AttemptPlan,
    VariantHealthRegistry,
    shorten_deadlines,
)
from nereid.backends.routing.interfaces import MetricSink, RequestTrace, RoutedRequest
from nereid.backends.routing.observation import Observe, Shadows
from nereid.base.contract import ROUTE_KEY_HEADER, read_unhealthy_instance
from nereid.base.errors import (
    Cancelled,
    DeadlineExceeded,
    InferenceFailed,
    Overloaded,
    ServingError,
    StubDied,
    Unavailable,
    from_exception,
)
from nereid.base.task_outputs import TaskOutputs
from nereid.client.retry import RetryBudget

# After an attempt that took longer, the client's connection is checked again.
LONG_ATTEMPT_S = 0.2


class Responses:
    """Sends responses and counts them; thread-safe.

    Args:
        shadows: receive the requests with a response.
    """

    def __init__(self, metrics: MetricSink, observe: Observe | None, shadows: Shadows) -> None:
        self._metrics, self._observe, self._shadows = metrics, observe, shadows

    def send(self, attempt: Attempt, response: Any) -> None:
        """Send the response of a variant, then mirror its request to the shadows."""
        admitted, labels = attempt.admitted, attempt.health.labels
        request, trace = admitted.request, admitted.trace
        if attempt.seconds > LONG_ATTEMPT_S and request.is_cancelled():
            self._metrics.add("cancelled_total")
        try:
            request.respond(response, attempt.variant.name, attempt.network_version, attempt.reason)
        except Exception as raised:  # a response that cannot be built must not leave its client waiting
            admitted.reject(from_exception(raised))
            return
        if trace.is_probe:
            trace.end()
            return
        if not attempt.is_chosen:
            self._count_fallback(attempt.plan, labels["variant"], attempt.reason)
        trace.end(**(self._observe(request, response, labels) if self._observe else {}))
        self._shadows.mirror(attempt, response)

    def fail(self, admitted: AdmittedRequest, plan: AttemptPlan, error: ServingError) -> None:
        """Send the configured answer if the route has one and no variant can be reached, else the error."""
        answer = admitted.loaded.answer
        is_unreachable = isinstance(error, Unavailable) and not plan.is_forced
        if not answer or not is_unreachable or admitted.trace.is_probe:
            admitted.reject(error)
            return
        try:
            admitted.request.answer(answer)
        except Exception as raised:
            admitted.reject(from_exception(raised))
            return
        self._count_fallback(plan, ANSWER, ANSWER)
        self.count(ANSWER, "", "ok", ANSWER)
        admitted.trace.end()

    def count(self, variant: str, version: str, outcome: str, reason: str) -> None:
        """Count an attempt on a variant, or a request without one."""
        self._metrics.add("requests_total", variant=variant, version=version, outcome=outcome, reason=reason)

    def _count_fallback(self, plan: AttemptPlan, to: str, reason: str) -> None:
        self._metrics.add("fallbacks_total", **{"from": plan.first_label, "to": to, "reason": reason})


# A request that waited longer than this for its thread is forwarded only if its client is still connected.
MAX_UNCHECKED_WAIT_S = 0.005
# While requests are rejected for lack of slots, the clients of the others are checked this often: each check
# is a round trip to the server.
CHECK_CLIENTS_S = 0.25


class Router:
    """Routes requests, each in its own thread; thread-safe.

    Args:
        task: the task of its variants.
        metrics: receives counts and durations.
        log: receives a line when a breaker opens or closes, or a shadow fails.
        clock: seconds of a monotonic clock.
        random_unit: random numbers in [0, 1).
        has_process: returns whether a dead instance's model has a running process of at least an age in s.
        begin_trace: returns the trace of a request that arrives.
        wake: called when a request has a deadline before the next call of `expire` that `sleep_s` announced,
            or when `free_abandoned` has something to do.
        observe: called with each response that was sent; see `RouteQuality.observe`.
        spawn: runs a function in another thread.
    """

    def __init__(
        self,
        loaded: LoadedRoute,
        task: TaskOutputs,
        metrics: MetricSink,
        log: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        random_unit: Callable[[], float] = random,
        has_process: Callable[[str, float], bool] = lambda instance, age_s: False,
        wake: Callable[[], None] = lambda: None,
        begin_trace: Callable[[RoutedRequest], RequestTrace] = lambda request: RequestTrace(None, "", ""),
        observe: Observe | None = None,
        spawn: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        self._metrics, self._clock, self._random_unit = metrics, clock, random_unit
        self._has_process, self._wake = has_process, wake
        self._begin_trace, self._spawn = begin_trace, spawn
        self._wakes_at = inf
        self._lock = Lock()
        self._loaded = loaded
        self._health = VariantHealthRegistry(metrics, log)
        self._attempts: set[Attempt] = set()
        self._in_flight = 0
        self._is_full = False
        self._clients_due_at = -inf
        self._abandoned = 0
        self._budget = RetryBudget()
        self._shadows = Shadows(task, metrics, log, clock, random_unit, lambda: self._in_flight)
        self._responses = Responses(metrics, observe, self._shadows)

    def use(self, loaded: LoadedRoute) -> None:
        """Use `loaded` for later requests; those in flight keep theirs."""
        with self._lock:
            self._health.keep_only(loaded)
            self._loaded = loaded

    def admit(self, request: RoutedRequest) -> AdmittedRequest | None:
        """Admit a request, which must then be handled, or reject it if too many are in flight."""
        loaded = self._loaded
        with self._lock:
            in_flight = self._in_flight
            if in_flight < loaded.route.max_in_flight:
                self._in_flight += 1
                return AdmittedRequest(request, loaded, self._clock(), self._begin_trace(request))
        self._metrics.add("shed_total")
        self._is_full = True
        if self._clock() >= self._clients_due_at:
            self._wake()
        overload = Overloaded(f"{in_flight} in flight, limit {loaded.route.max_in_flight}")
        request.reject(overload)
        self._begin_trace(request).end(overload)
        return None

    def handle(self, admitted: AdmittedRequest) -> None:
        """Respond to an admitted request, then mirror it to its shadows."""
        try:
            parameters = lower(admitted.request.parameters())
            admitted.trace.begin(parameters)
            admitted.key = parameters.get(ROUTE_KEY_HEADER, "")
            plan = AttemptPlan(admitted.loaded.route, self._choose(admitted, parameters))
        except Exception as raised:
            self._free_slot(admitted)
            admitted.reject(from_exception(raised))
            return
        self._finish(admitted, plan)

    def _finish(self, admitted: AdmittedRequest, plan: AttemptPlan) -> None:
        try:
            attempt, response = self._serve(admitted, plan)
        except _AlreadyEnded:
            return
        except Exception as raised:
            self._free_slot(admitted)
            self._responses.fail(admitted, plan, from_exception(raised))
            return
        # Before the response, because its client may send the next request immediately.
        self._free_slot(admitted)
        self._responses.send(attempt, response)

    def _move_on(self, attempt: Attempt) -> None:
        admitted, plan = attempt.admitted, attempt.plan
        try:
            error = StubDied(f"a process of variant '{attempt.variant.name}' has died")
            if not self._may_use_next_variant(attempt, error):
                raise self._final(attempt, error)
        except Exception as raised:
            self._free_slot(admitted)
            self._responses.fail(admitted, plan, from_exception(raised))
            return
        plan.mark_rest_as_retries()
        self._finish(admitted, plan)

    def expire(self) -> None:
        """Reject the requests past their deadline; their attempts continue.

        Requests in the queue of a dead process go to the next variant instead.
        """
        now = self._clock()
        with self._lock:
            late = [attempt for attempt in self._attempts if now >= attempt.deadline]
        for attempt in late:
            waited_ms = (now - attempt.admitted.arrived_at) * 1e3
            error = DeadlineExceeded(
                f"variant '{attempt.variant.name}' has not responded in {waited_ms:.0f} ms"
            )
            if not self._end(attempt, error, is_late=True):
                continue
            if attempt.is_queued_on_dead_stub and attempt.has_fallbacks:
                self._spawn(partial(self._move_on, attempt))
            else:
                self._free_slot(attempt.admitted)
                attempt.admitted.reject(error)
        self._shadows.expire()

    def free_abandoned(self) -> None:
        """If requests were rejected for lack of slots, free the slots of clients that have disconnected.

        Their attempts continue and occupy their threads, because Triton 24.10 cannot cancel them.
        """
        now = self._clock()
        if not self._is_full or now < self._clients_due_at:
            return
        self._is_full, self._clients_due_at = False, now + CHECK_CLIENTS_S
        with self._lock:
            holders = [attempt for attempt in self._attempts if attempt.admitted.has_slot]
        for attempt in holders:
            if self._abandoned < MAX_ABANDONED:
                self._free_if_abandoned(attempt)

    def _free_if_abandoned(self, attempt: Attempt) -> None:
        """Free the slot of a running attempt if its client has disconnected.

        Triton frees a request with its response, so the check must precede the response.
        """
        with attempt.admitted.response_lock:
            with self._lock:
                is_running = attempt in self._attempts
            if is_running and attempt.admitted.request.is_cancelled():
                self._free_slot(attempt.admitted)
                with self._lock:
                    attempt.admitted.is_abandoned = True
                    self._abandoned += 1

    def sleep_s(self, most_s: float) -> float:
        """Return the seconds until `expire` must be called again, at most `most_s`."""
        now = self._clock()
        with self._lock:
            self._wakes_at = min([now + most_s, *(attempt.deadline for attempt in self._attempts)])
            return max(0.0, self._wakes_at - now)

    def revive(self) -> None:
        """Let a trial through to each variant whose dead instances were replaced."""
        with self._lock:
            dead = [(health, health.dead_instances) for health in self._health if health.is_dead]
        for health, instances in dead:
            if instances and all(self._has_process(instance, 0.0) for instance in instances):
                with self._lock:
                    health.revive(self._clock())

    def _free_slot(self, admitted: AdmittedRequest) -> None:
        with self._lock:
            self._in_flight -= admitted.has_slot
            admitted.has_slot = False

    def _choose(self, admitted: AdmittedRequest, parameters: Mapping[str, str]) -> VariantChoice:
        if self._clock() - admitted.arrived_at > MAX_UNCHECKED_WAIT_S:
            self._check_client(admitted)
        try:
            admitted.request.check()
            return assignment.choose(admitted.loaded, parameters, self._random_unit())
        except ServingError as error:
            if not admitted.trace.is_probe:
                self._responses.count("", "", error.outcome, "")
            raise

    def _serve(self, admitted: AdmittedRequest, plan: AttemptPlan) -> tuple[Attempt, Any]:
        """Attempt the chosen variant; if it is unreachable, perhaps another instance or the next variant."""
        while True:
            attempt = self._begin(admitted, plan)
            try:
                return attempt, self._run(attempt)
            except Unavailable as error:
                if isinstance(error, StubDied) and attempt.has_live_instance:
                    if self._may_try_again(attempt, error):
                        plan.repeat(VariantChoice(attempt.variant, attempt.reason))
                        continue
                    if not attempt.has_fallbacks:
                        raise self._final(attempt, error) from None
                if not self._may_use_next_variant(attempt, error):
                    raise self._final(attempt, error) from None
                plan.mark_rest_as_retries()

    def _may_try_again(self, attempt: Attempt, error: StubDied) -> bool:
        """Return whether to send a request to its variant again, because one of several instances is dead."""
        with self._lock:
            instance = read_unhealthy_instance(str(error))
            may_try = attempt.health.may_try_again(attempt, instance, self._clock())
        if may_try:
            self._check_client(attempt.admitted)
        return may_try

    def _may_use_next_variant(self, attempt: Attempt, error: Unavailable) -> bool:
        """Return whether to send a request to the next variant.

        A request that a process could have received before it died may be the cause.
        """
        if not attempt.plan.has_choices:
            return False
        with self._lock:
            if self._is_suspect(attempt, error):
                may_use_next = attempt.has_fallbacks and attempt.health.may_send_suspect(
                    attempt.admitted, self._clock()
                )
            else:
                # Each request tries each variant once, so fallbacks need no budget.
                may_use_next = attempt.has_fallbacks or self._budget.record_failure()
        if may_use_next:
            self._check_client(attempt.admitted)
        return may_use_next

    @staticmethod
    def _is_suspect(attempt: Attempt, error: Unavailable) -> bool:
        """Return whether a process that could have received the request has since died."""
        is_new_death = isinstance(error, StubDied) and not attempt.was_dead
        return is_new_death and attempt.health.could_have_received(
            attempt, read_unhealthy_instance(str(error))
        )

    def _final(self, attempt: Attempt, error: Unavailable) -> ServingError:
        """Return the error for the client, which may repeat a request only if it has killed no process."""
        with self._lock:
            is_suspect = attempt.admitted.is_suspect or self._is_suspect(attempt, error)
        return InferenceFailed(*error.args) if is_suspect else error

    def _check_client(self, admitted: AdmittedRequest) -> None:
        if admitted.request.is_cancelled():
            self._metrics.add("cancelled_total")
            raise Cancelled("the client has disconnected")

    def _begin(self, admitted: AdmittedRequest, plan: AttemptPlan) -> Attempt:
        now, skipped = self._clock(), []
        with self._lock:
            while plan.has_choices:
                choice = plan.next()
                health = self._health.of(admitted.loaded, choice.variant)
                skipped.append((choice, health))
                if choice is plan.first:
                    plan.first_label = health.labels["variant"]
                if health.allows(now):
                    attempt = Attempt(admitted, plan, choice, health, now)
                    self._attempts.add(attempt)
                    self._health.count_in_flight(health, 1)
                    if attempt.deadline < self._wakes_at:
                        self._wake()
                    return attempt
            if not admitted.trace.is_probe:
                choice, health = skipped[0]
                self._responses.count(**health.labels, outcome="unavailable", reason=choice.reason)
        open_s = admitted.loaded.route.breaker.open_s
        listed = ", ".join(f"'{choice.variant.name}'" for choice, _ in skipped)
        raise Unavailable(f"no healthy variant: {listed}; retried every {open_s:g} s")

    def _run(self, attempt: Attempt) -> Any:
        variant, request = attempt.variant, attempt.admitted.request
        response, error, trace = None, None, attempt.admitted.trace
        span = trace.attempt(variant.name, attempt.network_version, attempt.reason)
        try:
            remaining_s = max(attempt.deadline - self._clock(), 1e-6)
            response = request.forward(variant.model, variant.version, remaining_s, trace.parameters(span))
        except Exception as raised:
            error = from_exception(raised)
        trace.end_attempt(span, error)
        if isinstance(error, StubDied):
            attempt.has_live_instance = self._has_live_instance(attempt, error)
        is_late = not self._end(attempt, error)
        with self._lock:
            self._health.count_in_flight(attempt.health, -1)
            self._abandoned -= attempt.admitted.is_abandoned
            attempt.admitted.is_abandoned = False
            attempt.health.count_late(attempt, -is_late)
            if error is None:
                attempt.health.responded_at = self._clock()
        if is_late:
            self._metrics.add("late_total", **attempt.health.labels)
            raise _AlreadyEnded
        if error:
            raise error
        return response

    def _has_live_instance(self, attempt: Attempt, error: StubDied) -> bool:
        """Return whether another process may respond: a replacement only if no fallback can."""
        if not (instance := read_unhealthy_instance(str(error))):
            return False
        with self._lock:
            attempt.health.note_death(instance, now := self._clock())
        age_s = now - attempt.started_at if attempt.plan.has_choices and attempt.has_fallbacks else 0.0
        return self._has_process(instance, age_s)

    def _end(self, attempt: Attempt, error: ServingError | None, is_late: bool = False) -> bool:
        """Record how an attempt ended; return False if that was recorded before."""
        now = self._clock()
        with attempt.admitted.response_lock, self._lock:
            if attempt not in self._attempts:
                return False
            self._attempts.remove(attempt)
            attempt.health.record(attempt, error, now)
            attempt.health.count_late(attempt, is_late)
            if isinstance(error, StubDied) and (attempt.has_fallbacks or not attempt.has_live_instance):
                shorten_deadlines(self._attempts, attempt.health, now)
            if error is None:
                self._budget.record_success()
        attempt.seconds = now - attempt.admitted.arrived_at
        outcome = error.outcome if error else "ok"
        labels = attempt.health.labels
        if attempt.admitted.trace.is_probe:
            self._metrics.add("probes_total", **labels, outcome=outcome)
            return True
        self._responses.count(**labels, outcome=outcome, reason=attempt.reason)
        chosen = str(attempt.is_chosen).lower()
        self._metrics.add(
            "request_duration_seconds", attempt.seconds, outcome=outcome, chosen=chosen, **labels
        )
        return True


class _AlreadyEnded(Exception):
    """The attempt ended past its deadline: the client had an error, or another variant the request."""
