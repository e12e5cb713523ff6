"""Who is let in: permits, predictions of the wait, and token buckets."""

import asyncio

import pytest

from nereid.gateway.admission.admission import MAX_WAITING_PER_PERMIT, Admission, Permit
from nereid.gateway.admission.quotas import Quotas
from nereid.gateway.failures import Failure
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
        permit = take(admission)
        clock.now_s += rtt_s
        permit.answered()


def take(admission: Admission) -> Permit:
    """Take a permit while there is room."""
    return asyncio.run(admission.take(9))


def test_no_more_than_the_limit_are_in_flight(clock):
    """The next wait for their turn, in order, up to a bound; a permit given back twice counts once."""

    async def run() -> None:
        admission, came = Admission(64, clock), []
        limit = admission.limit
        permits = [await admission.take(9) for _ in range(limit)]

        async def wait(number: int) -> Permit:
            permit = await admission.take(9)
            came.append(number)
            return permit

        waiting = [asyncio.create_task(wait(number)) for number in range(limit * MAX_WAITING_PER_PERMIT)]
        await asyncio.sleep(0)
        with pytest.raises(Failure, match=f"{len(waiting)} images are in the queue") as refused:
            await admission.take(9)
        assert (refused.value.status, dict(refused.value.headers)) == (429, {b"retry-after": b"1"})
        assert (admission.in_flight, admission.waiting, came) == (limit, len(waiting), [])

        permits[0].release()
        permits[0].release()
        await asyncio.sleep(0)
        assert (admission.in_flight, came) == (limit, [0])
        waiting[1].cancel()
        await asyncio.sleep(0)
        assert admission.waiting == len(waiting) - 2
        for permit in permits[1:]:
            permit.release()
        for number, task in enumerate(waiting):
            if number != 1:
                (await task).release()
        assert came == [0, *range(2, len(waiting))]
        assert (admission.in_flight, admission.waiting) == (0, 0)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_who_waits_for_too_long_is_told(clock):
    """The deadline ends the waiting, and leaves the place to others; a turn given in that moment, too."""

    async def run() -> None:
        admission = Admission(1, clock)
        permit = await admission.take(9)
        with pytest.raises(Failure, match=r"no slot became free within 0.01 s") as late:
            await admission.take(0.01)
        assert late.value.code == "deadline_exceeded"

        second = asyncio.create_task(admission.take(9))
        await asyncio.sleep(0)
        permit.release()
        second.cancel()  # its turn has come, and it does not know yet
        await asyncio.gather(second, return_exceptions=True)
        assert (admission.in_flight, admission.waiting) == (0, 0)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_who_has_too_little_time_is_refused(clock):
    """Unless nothing is in flight: else a prediction that was wrong would be believed for ever."""
    admission = Admission(64, clock)
    learn(admission, clock, 0.2)

    admission.check(0.1)
    take(admission)
    admission.check(0.3)
    with pytest.raises(Failure, match=r"about 0.2 s now, but only 0.1 s are left"):
        admission.check(0.1)


def test_retry_after_is_how_long_the_server_needs(clock):
    """A round trip for each time that the limit is in flight or waits, in whole seconds."""
    admission = Admission(64, clock)
    learn(admission, clock, 2.0)

    async def run() -> float:
        asked = [asyncio.create_task(admission.take(99)) for _ in range(2 * admission.limit)]
        await asyncio.sleep(0)
        assert (admission.in_flight, admission.waiting) == (admission.limit, admission.limit)
        retry_after_s = admission.retry_after_s()
        for each in asked:
            each.cancel()
        return retry_after_s

    failure = Failure("overloaded", "", asyncio.run(run()))

    assert dict(failure.headers) == {b"retry-after": b"4"}


def test_burst_after_a_pause_is_let_in(clock):
    """What was offered lately says nothing about what the server can do."""
    admission = Admission(64, clock)
    learn(admission, clock, 0.01)
    clock.now_s += 60
    learn(admission, clock, 0.01, 1)

    async def run() -> int:
        asked = [asyncio.create_task(admission.take(9)) for _ in range(3 * admission.limit)]
        await asyncio.sleep(0)
        for each in asked:
            each.cancel()
        return admission.in_flight

    assert asyncio.run(run()) == admission.limit


def test_permit_of_a_cancelled_call_outlasts_it(clock):
    """The server computes what it has dispatched to the end, for about a mean round trip."""
    admission = Admission(64, clock)
    learn(admission, clock, 0.2)
    permit = take(admission)
    clock.now_s += 0.05

    assert permit.rest_s() == pytest.approx(0.15)


def test_bucket_lets_a_burst_pass_and_then_its_rate(clock):
    """Three at once, then one each half second; the refusal says when."""
    buckets = Quotas(2.0, 3, clock)
    alice = key("alice", "infer")

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
    buckets = Quotas(None, 1, clock)
    alice = key("alice", rate_per_s=1.0)

    buckets.take(alice)
    buckets.take(alice, 4, is_debt=True)
    clock.now_s += 4.9

    with pytest.raises(Failure):
        buckets.take(alice)
    clock.now_s += 0.1
    buckets.take(alice)
