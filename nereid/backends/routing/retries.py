"""Whether a request without a response is sent again: to its variant, or to the next one."""

from collections.abc import Callable
from threading import Lock

from nereid.backends.routing.attempts import AdmittedRequest, Attempt
from nereid.backends.routing.breaker import RetryBudget
from nereid.base.contract import read_unhealthy_instance
from nereid.base.serving_errors import Died, Unavailable


class Retries:
    """Decides for all requests of a route.

    Args:
        lock: guards the state of the variants.
        clock: seconds of a monotonic clock.
        check_client: raises `Cancelled` if the client has disconnected.
    """

    def __init__(
        self, lock: Lock, clock: Callable[[], float], check_client: Callable[[AdmittedRequest], None]
    ) -> None:
        self._lock, self._clock, self._check_client = lock, clock, check_client
        self._budget = RetryBudget()

    def succeeded(self) -> None:
        """Record a request that needs no retry; the caller holds the lock."""
        self._budget.succeeded()

    def may_try_again(self, attempt: Attempt, error: Died) -> bool:
        """Return whether a request goes to its variant again, as one of several instances is dead."""
        with self._lock:
            instance = read_unhealthy_instance(str(error))
            may_try = attempt.served.may_try_again(attempt, instance, self._clock())
        if may_try:
            self._check_client(attempt.admitted)
        return may_try

    def may_go_on(self, attempt: Attempt, error: Unavailable) -> bool:
        """Return whether a request goes to the next variant.

        A request that a process may have had when it died may be the cause.
        """
        if not attempt.rungs:
            return False
        admitted, served = attempt.admitted, attempt.served
        has_fallbacks = admitted.table.route.has_fallbacks
        with self._lock:
            if (
                isinstance(error, Died)
                and not attempt.was_dead
                and served.may_have_had(attempt, read_unhealthy_instance(str(error)))
            ):
                may_go_on = has_fallbacks and served.may_send_suspect(admitted, self._clock())
            else:
                # Each request tries each variant once, so fallbacks need no budget.
                may_go_on = has_fallbacks or self._budget.may_retry()
        if may_go_on:
            self._check_client(admitted)
        return may_go_on
