"""Admission: slots, estimates of the wait, and token quotas."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from nereid.gateway.admission import (
    ASSUMED_REMAINING_S,
    KEY_IDLE_TIMEOUT_S,
    MAX_LARGE_WAITING,
    MAX_LATE_HOLD_S,
    MAX_WAITING_PER_SLOT,
    Admission,
    FairQueue,
    Slot,
    UnitLatencies,
)
from nereid.gateway.failures import Failure
from nereid.gateway.keys import Quotas
from nereid.vision.imaging.formats.image_header import LARGE_COST
from tests.conftest import FakeClock
from tests.gateways import asynchronous, key
from tests.tables import cases


@pytest.fixture
def admission(clock):
    return Admission(64, clock)


def learn(admission: Admission, clock: FakeClock, rtt_s: float, count: int = 40) -> None:
    for _ in range(count):
        slot = take(admission)
        clock.now_s += rtt_s
        slot.release_answered()


def take(admission: Admission) -> Slot:
    return asyncio.run(admission.acquire(9))


async def asked(*requests: Coroutine[Any, Any, Any]) -> list[asyncio.Task]:
    """Begin requests; each then has a slot, or waits."""
    tasks = [asyncio.create_task(request) for request in requests]
    await asyncio.sleep(0)
    return tasks


async def admitted(admission: Admission, count: int) -> tuple[int, int, float]:
    """Send requests; return those in flight, those in the queue, and the time until a retry."""
    for task in await asked(*(admission.acquire(99) for _ in range(count))):
        task.cancel()
    return admission.in_flight, admission.waiting, admission.retry_after_s()


@asynchronous
async def test_requests_in_flight_are_limited(admission):
    came, limit = [], admission.limit
    slots = [await admission.acquire(9) for _ in range(limit)]

    async def wait(number: int) -> Slot:
        slot = await admission.acquire(9)
        came.append(number)
        return slot

    waiting = await asked(*(wait(number) for number in range(limit * MAX_WAITING_PER_SLOT)))
    with pytest.raises(Failure, match=f"{len(waiting)} images are in the queue") as rejected:
        await admission.acquire(9)
    assert (rejected.value.status, dict(rejected.value.headers)) == (429, {b"retry-after": b"1"})
    assert (admission.in_flight, admission.waiting, came) == (limit, len(waiting), [])

    slots[0].release()
    slots[0].release()
    await asyncio.sleep(0)
    assert (admission.in_flight, came) == (limit, [0])
    for slot in slots[1:]:
        slot.release()
    for task in waiting:
        (await task).release()
    assert came == [*range(len(waiting))]
    assert (admission.in_flight, admission.waiting) == (0, 0)


@asynchronous
async def test_slot_of_a_request_that_gives_up_is_free(clock):
    admission = Admission(1, clock)
    slot = await admission.acquire(9)
    (second,) = await asked(admission.acquire(9))
    slot.release()
    second.cancel()  # the slot is assigned, but the task has not resumed
    await asyncio.gather(second, return_exceptions=True)
    assert (admission.in_flight, admission.waiting) == (0, 0)


def test_request_with_too_little_time_is_rejected(admission, clock):
    """With nothing in flight the request passes, so that a wrong estimate is corrected."""
    learn(admission, clock, 0.2)

    admission.check(0.1)
    take(admission)
    admission.check(0.3)
    with pytest.raises(Failure, match=r"about 0.2 s now, but only 0.1 s are left"):
        admission.check(0.1)


def test_retry_after_is_the_estimated_time_of_the_queue(admission, clock):
    learn(admission, clock, 2.0)
    limit = admission.limit

    in_flight, waiting, retry_after_s = asyncio.run(admitted(admission, 2 * limit))

    assert (in_flight, waiting) == (limit, limit)
    assert dict(Failure("overloaded", "", retry_after_s).headers) == {b"retry-after": b"4"}


def test_burst_after_a_pause_is_admitted(admission, clock):
    learn(admission, clock, 0.01)
    clock.now_s += 60
    learn(admission, clock, 0.01, 1)

    in_flight, _, _ = asyncio.run(admitted(admission, 3 * admission.limit))

    assert in_flight == admission.limit


def test_quota_allows_a_burst_and_then_its_rate(clock):
    quotas = Quotas(2.0, 3, clock=clock)
    alice = key("alice", "infer")

    for _ in range(3):
        quotas.take(alice)
    with pytest.raises(Failure, match="2 images per second") as rejected:
        quotas.take(alice)
    assert rejected.value.code == "rate_limited"
    assert rejected.value.retry_after_s == pytest.approx(0.5)

    quotas.take(key("bob"))
    clock.now_s += 0.5
    quotas.take(alice)

    clock.now_s += 60
    for _ in range(3):
        quotas.take(alice)
    with pytest.raises(Failure):
        quotas.take(alice)


def test_images_of_a_batch_are_taken_as_debt(clock):
    quotas = Quotas(None, 1, clock=clock)
    alice = key("alice", rate_per_s=1.0)

    quotas.take(alice)
    quotas.take(alice, 4, is_debt=True)
    clock.now_s += 4.9

    with pytest.raises(Failure):
        quotas.take(alice)
    clock.now_s += 0.1
    quotas.take(alice)


@cases(
    equal=("", {"a": 1, "b": 1}, "ababababb"),
    one_takes_three_times_as_long=("", {"a": 3, "b": 1}, "abbbabbaa"),
    one_was_alone_before=("aaaaaaaaa", {"a": 1, "b": 1}, "babababab"),
)
@asynchronous
async def test_keys_share_the_time(before, seconds, expected):
    turns, came = FairQueue(lambda: 1), ""

    async def wait(key_id: str) -> None:
        nonlocal came
        await turns.acquire(key_id)
        came += key_id
        turns.release(key_id, seconds[key_id])

    for key_id in before:
        await wait(key_id)
    await turns.acquire("")
    tasks = await asked(*(wait(key_id) for key_id in sorted(expected)))
    turns.release("")
    await asyncio.gather(*tasks)

    assert came == before + expected


@asynchronous
async def test_full_queue_of_a_key_is_full_for_that_key_only(admission):
    for _ in range(admission.limit):
        await admission.acquire(9)
    await asked(*(admission.acquire(99, "a") for _ in range(MAX_WAITING_PER_SLOT * admission.limit)))

    with pytest.raises(Failure, match="in the queue"):
        admission.check(99, "a")
    admission.check(99, "b")


@asynchronous
async def test_large_images_go_one_at_a_time(admission):
    first = await admission.acquire(9, "a", costs=[LARGE_COST])
    others = await asked(*(admission.acquire(9, "a", costs=[LARGE_COST]) for _ in range(MAX_LARGE_WAITING)))

    with pytest.raises(Failure, match=f"{MAX_LARGE_WAITING} large images of this key are in the queue"):
        await admission.acquire(9, "a", costs=[LARGE_COST])
    (await admission.acquire(9, "a")).release()
    (other_key,) = await asked(admission.acquire(9, "b", costs=[LARGE_COST]))
    assert (admission.in_flight, admission.waiting) == (1, MAX_LARGE_WAITING + 1)

    first.release_answered()
    slots = [await others[0]]
    slots[0].release()
    await asyncio.sleep(0)
    assert (other_key.done(), others[1].done()) == (True, False)
    (await other_key).release()
    for task in others[1:]:
        (await task).release()
    assert (admission.in_flight, admission.waiting) == (0, 0)


@cases("options", any={}, large={"costs": [LARGE_COST]}, first_of_a_key={"key_id": "a"})
@asynchronous
async def test_request_that_gives_up_frees_its_turn(clock, options):
    admission = Admission(1, clock)
    admission.unit_latencies.record("b", "", 0.01, 1)
    held = await admission.acquire(9)
    with pytest.raises(Failure, match=r"no slot became free within 0.01 s") as late:
        await admission.acquire(0.01, **options)
    assert admission.waiting == 0
    held.release()
    held = await admission.acquire(9)
    first, second = await asked(*(admission.acquire(9, **options) for _ in range(2)))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    held.release()

    (await second).release()
    assert (late.value.code, admission.in_flight, admission.waiting) == ("deadline_exceeded", 0, 0)


def test_round_trip_of_a_large_image_says_nothing(admission, clock):
    """It would lower the limit for small ones."""
    learn(admission, clock, 0.2)
    slot = asyncio.run(admission.acquire(99, costs=[LARGE_COST]))
    clock.now_s += 60
    slot.release_answered()

    take(admission)
    admission.check(0.3)


@cases("limit", two=2, many=64)
@asynchronous
async def test_key_that_is_alone_uses_all_slots(clock, limit):
    """Another one gets the next slot that is free, and from then on has one left to it for a minute."""
    admission = Admission(limit, clock)
    slots = [await admission.acquire(9, "a") for _ in range(admission.limit)]
    waiting = await asked(*(admission.acquire(9, key_id) for key_id in "aab"))
    assert (admission.in_flight, admission.waiting) == (admission.limit, 3)

    slots.pop().release()
    (await waiting[2]).release()
    await asyncio.sleep(0)
    assert (admission.in_flight, admission.waiting) == (admission.limit - 1, 2)

    clock.now_s += KEY_IDLE_TIMEOUT_S + 1
    slots.pop().release()
    slots += [await task for task in waiting[:2]]
    assert admission.in_flight == admission.limit
    for slot in slots:
        slot.release()
    assert (admission.in_flight, admission.waiting) == (0, 0)


@asynchronous
async def test_large_images_of_an_unknown_key_do_not_pile_up(admission):
    admission.unit_latencies.record("b", "m", 0.01, 1)
    large = (admission.acquire(9, "a", [LARGE_COST], "m") for _ in range(1 + MAX_LARGE_WAITING))
    tasks = await asked(*large)

    with pytest.raises(Failure, match=f"{MAX_LARGE_WAITING} large images of this key are in the queue"):
        await admission.acquire(9, "a", [LARGE_COST], "m")
    for task in tasks:
        (await task).release()
    assert (admission.in_flight, admission.waiting) == (0, 0)


@asynchronous
async def test_one_key_leaves_a_slot_to_others(admission):
    (await admission.acquire(9, "b")).release()
    admission.unit_latencies.record("a", "", 0.01, 1)
    admission.unit_latencies.record("b", "", 0.01, 1)
    many = await asked(*(admission.acquire(9, "a") for _ in range(admission.limit + 5)))
    assert admission.in_flight == admission.limit - 1

    (await admission.acquire(9, "b")).release()
    without_key = await admission.acquire(9)
    assert admission.in_flight == admission.limit

    without_key.release()
    for task in many:
        (await task).release()
    assert (admission.in_flight, admission.waiting) == (0, 0)


@asynchronous
async def test_first_request_of_a_key_to_a_model_tells_what_the_others_cost(admission, clock):
    admission.unit_latencies.record("b", "read", 0.01, 1)
    tasks = await asked(*(admission.acquire(9, "a", [cost], "read") for cost in (1, LARGE_COST, 1, 1)))
    other_model = await admission.acquire(9, "a", model="classify")
    assert (admission.in_flight, admission.waiting) == (2, 3)

    first = await tasks[0]
    clock.now_s += 1
    first.measure(is_answered=True)
    first.release_answered()
    await asyncio.sleep(0.01)
    assert (admission.in_flight, admission.waiting) == (2, 2)  # costly ones go one at a time
    (await admission.acquire(9, "b", model="read")).release()

    other_model.release()
    for task in tasks[1:]:
        (await task).release()
    assert (admission.in_flight, admission.waiting) == (0, 0)


@cases(
    only_key=([("a", 1.0)], sys.maxsize),
    unknown=([("b", 1.0)], 1),
    fast=([("b", 0.05), ("a", 0.05)], sys.maxsize),
    slow=([("b", 1.0), ("a", 1.0)], 4),
    slow_among_fast_ones=([("b", 0.05), ("a", 1.0)], 4),
    no_key=([("b", 1.0), ("", 1.0)], sys.maxsize),
)
def test_slow_requests_of_a_key_leave_instances_to_others(requests, most, clock):
    unit_latencies, key_id = UnitLatencies(clock, cores=8), "a" if requests[-1][0] else ""
    for name, seconds in requests:
        unit_latencies.record(name, "m", seconds, 1)

    assert unit_latencies.max_in_flight_of(key_id, "m") == most
    clock.now_s += KEY_IDLE_TIMEOUT_S + 1
    assert unit_latencies.max_in_flight_of(key_id, "m") == sys.maxsize


@cases(
    as_others=([("b", 0.01, 1, 1)] * 3 + [("a", 0.01, 1, 1)], False, 0),
    little_more=([("b", 0.01, 1, 1), ("a", 0.07, 1, 1)], False, 0),
    undeclared=([("b", 0.01, 1, 1), ("a", 1.0, 1, 1)], True, 79),
    declared=([("b", 0.01, 1, 1), ("a", 0.64, 64, 1)], False, 0),
    many_cheap_ones_at_once=([("b", 0.01, 1, 1), ("a", 0.32, 1, 32)], False, 0),
    many_costly_ones_at_once=([("b", 0.01, 1, 1), ("a", 8.0, 1, 8)], True, 79),
    beside_early_refusals=([("b", 0.001, 1, 1, False)] * 3 + [("a", 0.3, 1, 1)], False, 0),
    beside_tiny_images=([("b", 0.001, 1, 1)] * 3 + [("a", 0.05, 1, 1)], False, 0),
    refused_late=([("b", 0.3, 1, 1), ("a", 9.0, 1, 1, False)], False, 29),
    behind_those_of_another_key=([("b", 2.0, 1, 1), ("a", 2.0, 1, 2)], False, 0),
    hidden_among_cheap_ones=([("b", 0.01, 1, 1), ("a", 2.0, 1, 1)] + [("a", 0.01, 1, 1)] * 50, True, 0),
    alone=([("a", 9.0, 1, 1)], False, 0),
)
def test_cost_of_a_key_is_that_beyond_others(requests, is_costly, debt, clock):
    unit_latencies = UnitLatencies(clock)

    *_, last = [unit_latencies.record(key_id, "m", *request) for key_id, *request in requests]

    assert (unit_latencies.is_costly("a", "m"), last) == (is_costly, debt)
    assert not unit_latencies.is_costly("a", "other")
    clock.now_s += KEY_IDLE_TIMEOUT_S + 1
    assert not unit_latencies.is_costly("a", "m")


@cases(
    small=(1, 0.5, 1.5, ASSUMED_REMAINING_S - 0.5),
    batch=(3, 0.5, 5.5, 5.5),
    later_than_usual=(1, 5.0, 0.0, 5.0),
    large=(8, 5.0, MAX_LATE_HOLD_S, MAX_LATE_HOLD_S),
    late_and_large=(8, 56.0, MAX_LATE_HOLD_S, MAX_LATE_HOLD_S),
)
def test_late_request_keeps_its_slot_for_as_long_as_its_key_usually_takes(
    cost, spent_s, abandoned_work_s, limited_s, admission, clock
):
    admission.unit_latencies.record("a", "m", 2.0, 1)
    slot = asyncio.run(admission.acquire(9, "a", [cost], "m"))
    clock.now_s += spent_s

    assert slot.abandoned_work_s() == pytest.approx(abandoned_work_s)
    slot.measure(is_answered=False)
    assert admission.unit_latencies.expected_s("a", "m") >= 2.0  # what was left early says nothing about less
    admission.unit_latencies.record("b", "m", 0.2, 1)
    assert slot.abandoned_work_s() == pytest.approx(limited_s)  # now that another key uses the model
