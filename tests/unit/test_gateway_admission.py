"""Who is let in: permits, predictions of the wait, and token buckets."""

import pytest

from clients.gateway.admission import Admission
from clients.gateway.buckets import Buckets
from clients.gateway.errors import Failure
from tests.gateways import key


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


@pytest.fixture
def clock():
    """A clock at some time."""
    return Clock()


def learn(admission: Admission, clock: Clock, rtt_s: float, count: int = 40) -> None:
    """Let requests be answered one after the other, so that round trip and rate are known."""
    for _ in range(count):
        permit = admission.take(9)
        clock.now_s += rtt_s
        permit.answered()


def test_no_more_than_the_limit_are_in_flight(clock):
    """The next one is refused as overload with a time; a permit given back twice counts once."""
    admission = Admission(64, clock)
    permits = [admission.take(9) for _ in range(admission.limit)]

    with pytest.raises(Failure, match="in flight") as refused:
        admission.take(9)

    assert (refused.value.status, dict(refused.value.headers)) == (429, {b"retry-after": b"1"})
    permits[0].release()
    permits[0].release()
    assert admission.in_flight == len(permits) - 1


def test_who_has_too_little_time_is_refused(clock):
    """Unless nothing is in flight: else a prediction that was wrong would be believed for ever."""
    admission = Admission(64, clock)
    learn(admission, clock, 0.2)

    admission.check(0.1)
    admission.take(9)
    admission.check(0.3)
    with pytest.raises(Failure, match=r"about 0.2 s now, and 0.1 s are left"):
        admission.check(0.1)


def test_retry_after_is_how_long_the_server_needs(clock):
    """What is in flight over the rate of answers, in whole seconds."""
    admission = Admission(64, clock)
    learn(admission, clock, 2.0)
    for _ in range(3):
        admission.take(9)

    failure = Failure("overloaded", "", admission.retry_after_s())

    assert admission.retry_after_s() == pytest.approx(6.0)
    assert dict(failure.headers) == {b"retry-after": b"6"}


def test_permit_of_a_cancelled_call_outlasts_it(clock):
    """The server computes what it has dispatched to the end, for about a mean round trip."""
    admission = Admission(64, clock)
    learn(admission, clock, 0.2)
    permit = admission.take(9)
    clock.now_s += 0.05

    assert permit.rest_s() == pytest.approx(0.15)


def test_bucket_lets_a_burst_pass_and_then_its_rate(clock):
    """Three at once, then one each half second; the refusal says when."""
    buckets = Buckets(2.0, 3, clock)
    alice = key("alice")

    for _ in range(3):
        buckets.take(alice)
    with pytest.raises(Failure, match="2 images per second") as refused:
        buckets.take(alice)
    assert refused.value.code == "rate_limited"
    assert refused.value.retry_after_s == pytest.approx(0.5)

    buckets.take(key("bob"))
    clock.now_s += 0.5
    buckets.take(alice)


def test_images_of_a_batch_are_owed(clock):
    """A batch is taken whole, and paid for by what follows."""
    buckets = Buckets(None, 1, clock)
    alice = key("alice", rate_per_s=1.0)

    buckets.take(alice)
    buckets.take(alice, 4, is_debt=True)
    clock.now_s += 4.9

    with pytest.raises(Failure):
        buckets.take(alice)
    clock.now_s += 0.1
    buckets.take(alice)
