"""What a soak reads out of its numbers: growth told from noise, what is left, and wrong outcomes."""

import mmap
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from loadtest.resource_usage import Usage, own_bytes
from loadtest.soak import traffic as traffic_of
from loadtest.soak.evaluation import Outcome, calm, judge, result
from loadtest.soak.observation import Quiet, Sample, Sampler, lasting, minimum, present
from loadtest.soak.scenario import Scenario
from loadtest.soak.traffic import Kind, Tally, Target, Traffic, rejection
from loadtest.soak.valid_requests import BAD_PLACE, Photo, as_prediction, outcome_fault
from loadtest.soak.verdict import absent, growth, markdown, not_more, traffic_markdown
from nereid import metrics_page
from nereid.client.classifier_errors import Overloaded, RequestRefused, ServerFailed, TimedOut
from nereid.client.prediction import Label, Prediction, Timings

# As samples are taken: every so often, at a random moment.
MINUTES = (np.arange(200) + np.random.default_rng(0).random(200)) / 10
# Of a tree of 800 MB, samples differ by a few.
BASE_MB, NOISE_MB, SHARE = 800.0, 3.0, 0.01
WATCHDOG_S = 30.0
# Kinds that hang: to wait 0.2 s for one after the other takes longer than the watchdog.
MANY = 200


def noise() -> np.ndarray:
    """The same noise in every run, MB."""
    return np.random.default_rng(1).normal(0, NOISE_MB, len(MINUTES))


def sawtooth(period_min: float, height_mb: float) -> np.ndarray:
    """What comes with each new version, and goes with it, MB."""
    return height_mb * (MINUTES % period_min) / period_min


@pytest.mark.parametrize(
    ("more", "is_good"),
    [
        (np.zeros(200), True),
        (sawtooth(0.5, 60), True),
        (sawtooth(2, 60), True),
        (60 * (MINUTES > 1), True),
        (60 * (MINUTES < 1), True),
        (np.where(np.arange(200) % 20, 0, 200), True),
        (-0.01 * BASE_MB * MINUTES, True),
        (0.0003 * BASE_MB * MINUTES, True),
        (0.01 * BASE_MB * MINUTES, False),
        (0.01 * BASE_MB * MINUTES + sawtooth(0.5, 60), False),
        (0.0015 * BASE_MB * MINUTES, False),
        (0.01 * BASE_MB * np.floor(MINUTES), False),
    ],
    ids=[
        "flat",
        "sawtooth",
        "slow sawtooth",
        "step at the start",
        "more at the start",
        "peaks",
        "falling",
        "a leak of 0.6 % in all",
        "a leak of 1 % a minute",
        "a leak below a sawtooth",
        "a leak of 3 % in all",
        "a leak in steps",
    ],
)
def test_growth_is_told_from_what_comes_and_goes(more, is_good):
    """Only what surely grows, and by more than the bound, fails: not noise, one step, peaks or a sawtooth."""
    found = growth("memory", "MB", MINUTES, BASE_MB + noise() + more, SHARE)

    assert found.is_good is is_good, found.text()
    assert found.trend.low <= found.trend.slope <= found.trend.high


def test_slope_is_that_of_the_line():
    """A line has its slope, certainly."""
    found = growth("memory", "MB", MINUTES, BASE_MB + 2 * MINUTES, SHARE)

    assert [found.trend.slope, found.trend.low, found.trend.high] == pytest.approx([2, 2, 2])
    assert found.bound == pytest.approx(SHARE * (BASE_MB + 20) / 20, rel=0.01)


def test_short_series_is_no_trend():
    """Who asks for a verdict on a few samples is told how to get more."""
    with pytest.raises(ValueError, match="expected 8 samples, got 3; fix: a longer soak"):
        growth("memory", "MB", MINUTES[:3], MINUTES[:3], SHARE)


def test_counts_may_fall_and_not_rise():
    """One more than before fails; what must not be there fails by name."""
    assert not_more("open files", 10, 9).is_good
    assert not not_more("open files", 10, 11).is_good
    assert absent("zombies", []).is_good
    found = absent("zombies", [17, 18])
    assert (found.is_good, found.text()) == (False, "zombies (17, 18): expected at most 0, got 2 (before: 0)")


def test_zombie_is_one_that_stays():
    """What has ended between two looks is collected at the next; the same pid may be another process."""

    def seen(*zombies: tuple[int, float]) -> Sample:
        return Sample(0, {}, frozenset(zombies))

    assert lasting([seen((1, 0.5)), seen(), seen((1, 0.5)), seen((1, 7.5))]) == set()
    assert lasting([seen(), seen((1, 0.5)), seen((1, 0.5), (2, 0.5))]) == {1}


def test_least_of_several_looks():
    """The supervisor's own question, which one look in several meets, is nothing that stays."""
    assert minimum([Usage(1, 0, 9, 20, 5), Usage(2, 0, 8, 21, 6)]) == Usage(1, 0, 8, 20, 5)


def test_memory_is_a_process_own(tmp_path):
    """What it takes and shares counts; a file that it maps does not, since others' mapping it would tell."""
    size = 64 * 2**20
    (tmp_path / "library").write_bytes(bytes(size))
    before = own_bytes(os.getpid())

    with (
        (tmp_path / "library").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping,
    ):
        assert sum(mapping[:: mmap.PAGESIZE]) == 0
        mapped = own_bytes(os.getpid())
    with mmap.mmap(-1, size) as own:
        own.write(b"a" * size)
        taken = own_bytes(os.getpid())

    assert abs(mapped - before) < size / 2
    assert taken - before > size / 2


def test_what_takes_most_memory_comes_early():
    """While the server warms up, a kind is sent faster if that is said, and none more slowly."""
    kind = Kind("large", 0.1, lambda target: None)

    assert [replace(kind, warming_per_s=each).warming().per_s for each in (0.0, 1.0)] == [0.1, 1.0]


# What a whole soak shows

USAGE = {"server": Usage(7, 0, 800, 200, 700_000_000), "gateway": Usage(1, 0, 9, 21, 80_000_000)}
QUIET = Quiet(USAGE, frozenset({"region-1"}), (), {"nereid_route_in_flight": 0.0}, 0.0)
GOOD = Tally(Kind("gRPC", 1, lambda target: None), sent=10)
MEMORY = {"tritonserver": 50_000_000, "classify_v1_0_0": 110_000_000}
SAMPLES = [Sample(float(second), USAGE, frozenset(), MEMORY) for second in range(60)]
ROUNDS = 6
OUTCOME = Outcome(
    [GOOD], SAMPLES, SAMPLES, SAMPLES, ROUNDS, QUIET, QUIET, frozenset(), {"published": 7}, 0.5, []
)


def grown_usage(**more: int) -> dict[str, Usage]:
    """Return the usage with more of something in the server's tree."""
    server = USAGE["server"]
    return USAGE | {
        "server": replace(server, **{name: getattr(server, name) + n for name, n in more.items()})
    }


# 60 MB in a minute, of one process; and 60 MB in six rounds of changes.
LEAKING = [
    replace(each, memory=MEMORY | {"tritonserver": MEMORY["tritonserver"] + int(each.at_s) * 1_000_000})
    for each in SAMPLES
]
CHARGED = [
    replace(each, usage=grown_usage(memory_bytes=int(each.at_s // 10) * 10_000_000)) for each in SAMPLES
]


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        ({}, []),
        ({"steady": LEAKING}, ["memory, tritonserver"]),
        ({"calm": CHARGED}, ["memory per round of changes, server"]),
        ({"calm": CHARGED, "rounds": 0}, []),
        ({"after": replace(QUIET, usage=grown_usage(open_files=1))}, ["open files, server"]),
        ({"after": replace(QUIET, usage=grown_usage(processes=1))}, ["processes, server"]),
        ({"after": replace(QUIET, regions=frozenset({"region-2", "region-3"}))}, ["shared memory regions"]),
        ({"left_over": frozenset({"x"})}, ["shared memory regions, after the server (x)"]),
        ({"after": replace(QUIET, registered=("x",))}, ["registered regions (x)"]),
        ({"after": replace(QUIET, gauges={"nereid_route_in_flight": 1.0})}, ["`nereid_route_in_flight`"]),
        ({"after": replace(QUIET, repairs=1.0)}, ["repairs and restarts by the supervisor"]),
        ({"samples": [*SAMPLES, Sample(60, USAGE, frozenset({(17, 0.5)}))]}, ["zombies (17)"]),
        ({"tallies": [replace(GOOD, wrong=1)]}, ["wrong outcomes"]),
        ({"tallies": [replace(GOOD, due=21)]}, ["kinds sent too rarely (gRPC)"]),
    ],
    ids=[
        "none",
        "memory",
        "memory of each change",
        "one change",
        "fd",
        "process",
        "shm",
        "left",
        "told",
        "gauge",
        "repair",
        "zombie",
        "wrong",
        "starved",
    ],
)
def test_each_fault_fails_by_its_own_name(fault, failed):
    """One fault, one failed row; without any there is none."""
    outcome = replace(OUTCOME, **fault)

    verdicts = judge(outcome, SHARE)

    assert [each.what for each in verdicts if not each.is_good] == failed
    rows = result(outcome, verdicts)["rows"]
    assert markdown(rows).count("**failed**") == len(failed)


@pytest.mark.parametrize("seen", [0, 5, 60], ids=["nothing", "little", "much"])
def test_what_was_seen_before_trouble_is_judged(seen):
    """A server that ends amid a soak takes neither the tallies nor the samples before it along."""
    samples, tallies = SAMPLES[:seen], [replace(GOOD, wrong=1)]
    seen_before = {"samples": samples, "steady": samples, "calm": samples, "after": None}
    outcome = replace(OUTCOME, tallies=tallies, trouble=["the server has ended"], **seen_before)

    verdicts = judge(outcome, SHARE)

    assert [each.what for each in verdicts if not each.is_good] == ["wrong outcomes"]
    assert any(each.what == "memory, tritonserver" for each in verdicts) == (seen == 60)
    assert len(result(outcome, verdicts)["series"]["seconds"]) == seen


def test_too_few_samples_without_trouble_are_an_error():
    """Memory that nobody has judged must not pass."""
    with pytest.raises(ValueError, match="expected 8 samples"):
        judge(replace(OUTCOME, steady=SAMPLES[:5]), SHARE)
    with pytest.raises(ValueError, match="changes: expected 8 samples"):
        judge(replace(OUTCOME, calm=SAMPLES[:5]), SHARE)


@pytest.mark.parametrize("count", [200, 201, 1001])
def test_record_is_thinned_and_has_all_kinds(count):
    """However long a soak was, its record stays small; the table of what was sent has each kind."""
    many = [Sample(float(second), USAGE, frozenset(), MEMORY) for second in range(count)]

    found = result(replace(OUTCOME, samples=many, calm=many[:10]), [])

    series = found["series"]
    assert len(set(series["seconds"])) == len(series["server memory_bytes"]) == 200
    assert set(series["tritonserver memory"]) == {50_000_000}
    assert (series["seconds"][0], series["seconds"][-1]) == (0, count - 1)
    assert traffic_markdown(found["traffic"]).splitlines()[2] == "| gRPC | 10 | 0 |"


def test_calm_samples_are_those_of_calm_spans():
    """Like is compared with like: nothing is judged that was seen while something changed."""
    assert [each.at_s for each in calm(SAMPLES, [(3, 5), (57.5, 90)])] == [3, 4, 5, 58, 59]


# Outcomes


def raising(error: Exception):
    """Return a call that raises."""

    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("call", "is_right"),
    [
        (raising(RequestRefused("invalid image: none")), True),
        (raising(RequestRefused("invalid request: none")), False),
        (raising(ServerFailed("invalid image: none")), False),
        (raising(Overloaded("invalid image: none")), False),
        (raising(KeyError("invalid image: ")), False),
        (lambda: "an answer", False),
    ],
    ids=["as expected", "other words", "its base", "another class", "not ours", "answered"],
)
def test_refusal_has_class_and_words(call, is_right):
    """A bad request that is answered, or refused for another reason, is as wrong as a good one refused."""
    assert (rejection(call, RequestRefused, "invalid image: ") == "") is is_right


class Known:
    """References that know one version."""

    def check(self, prediction: Prediction) -> str:
        """Tell what is wrong."""
        return "" if prediction.version == "1" else f"version {prediction.version}"


PHOTO = Photo(b"", Known())
RIGHT = Prediction((Label(967, "espresso", 0.9),), "classify", "1", "v1", "weight", "", Timings(0, 0))


@pytest.mark.parametrize(
    ("place", "outcome", "failure"),
    [
        (0, RIGHT, ""),
        (0, replace(RIGHT, version="2"), "version 2"),
        (0, TimedOut("late"), "image 0: TimedOut: late"),
        (BAD_PLACE, RequestRefused("no image"), ""),
        (BAD_PLACE, TimedOut("late"), f"image {BAD_PLACE}: expected a rejection, got late"),
    ],
    ids=["right", "wrong answer", "failed", "bad and refused", "bad and late"],
)
def test_outcomes_of_a_batch(place, outcome, failure):
    """Each image of a batch has the outcome that it would have alone."""
    assert outcome_fault(place, outcome, PHOTO) == failure


def test_gateways_answer_is_a_prediction():
    """What it answers is checked by the same references."""
    scores = [{"label": "espresso", "index": 967, "score": 0.9}]
    answer = {"model": "classify", "version": "1", "variant": "v1", "reason": "weight", "predictions": scores}

    assert as_prediction(answer) == RIGHT


def test_kind_is_sent_on_schedule_and_counted():
    """Whatever a request comes to, the next ones are sent; the first failures are told by kind."""
    sent, is_enough = [], threading.Event()

    @contextmanager
    def opened(target: Target):
        def send() -> str:
            sent.append(target.http)
            if len(sent) == 6:
                is_enough.set()
            if len(sent) % 2:
                raise OSError("gone")
            return ""

        yield send

    with Traffic([Kind("odd", 100, opened)], Target("here", "", "")) as traffic:
        assert is_enough.wait(60)

    (tally,) = traffic.tallies
    assert (tally.sent, tally.wrong) == (len(sent), (len(sent) + 1) // 2)
    assert tally.failures == ["odd: OSError: gone"] * 3


def test_kind_that_cannot_be_opened_fails():
    """A soak in which nothing is sent does not pass."""

    @contextmanager
    def opened(target: Target):
        raise OSError("no such server")
        yield

    with Traffic([Kind("none", 1, opened)], Target("", "", "")) as traffic:
        pass

    assert (traffic.tallies[0].wrong, traffic.tallies[0].failures) == (1, ["none: OSError: no such server"])


def test_requests_that_hang_are_told(monkeypatch):
    """Neither does the soak wait for each of them, nor does a kind pass of which one request was sent."""
    monkeypatch.setattr(traffic_of, "JOIN_S", 0.2)
    asked, is_over, ended = threading.Semaphore(0), threading.Event(), threading.Event()
    traffic = Traffic([Kind("hanging", 20, lambda target: opened())] * MANY, Target("", "", ""))

    @contextmanager
    def opened():
        def send() -> str:
            asked.release()
            return "" if is_over.wait(WATCHDOG_S) else "late"

        yield send

    def play() -> None:
        with traffic:
            for _ in range(MANY):
                assert asked.acquire(timeout=WATCHDOG_S)
            time.sleep(0.5)
        ended.set()

    threading.Thread(target=play, daemon=True).start()
    assert ended.wait(WATCHDOG_S)
    is_over.set()

    for tally in traffic.tallies:
        assert (tally.sent, tally.wrong, tally.is_starved) == (1, 1, True)
        assert "hanging: neither a response nor a failure" in tally.failures[0]


def test_change_that_fails_ends_the_play_and_loses_nothing():
    """What was asked until then is counted, and the error is told."""
    is_asked = threading.Event()

    class Changes:
        """Cannot be made once something was asked."""

        def cycle(self) -> None:
            """Fail."""
            assert is_asked.wait(WATCHDOG_S)
            raise OSError("no such server")

    @contextmanager
    def opened(target: Target):
        yield lambda: is_asked.set() or ""

    played = Scenario([Kind("any", 100, opened)], Target("", "", ""), Changes()).play(WATCHDOG_S, 0.0, 0.0)

    assert played.trouble == ["a change failed: OSError: no such server"]
    assert [tally.sent > 0 for tally in played.tallies] == [True]
    assert len(played.calm) == 1


def test_play_ends_where_nothing_more_can_be_seen():
    """Nobody waits for the rest of a soak that has failed."""

    class Changes:
        """Changes nothing."""

        def cycle(self) -> None:
            """Be done."""

    end_s = time.monotonic() + 0.1
    scenario = Scenario([], Target("", "", ""), Changes())
    played = scenario.play(WATCHDOG_S, 0.1, WATCHDOG_S, is_over=lambda: time.monotonic() > end_s)
    assert time.monotonic() < end_s + WATCHDOG_S / 2

    assert (len(played.calm), played.trouble) == (1, [])


def test_metric_that_is_on_no_page_is_not_zero():
    """One that has another name now would pass for ever."""
    page = [metrics_page.Sample("a", {}, 1.0), metrics_page.Sample("a", {}, 2.0)]

    assert present(page, ["a"]) == {"a": 3.0}
    with pytest.raises(LookupError, match="no page has b"):
        present(page, ["a", "b"])


def test_sampler_that_cannot_look_says_so():
    """Whatever the reason: who waits for its samples is told."""

    def look() -> Sample:
        """See nothing."""
        raise ValueError("no number")

    with Sampler(look, 0.01) as sampler:
        deadline = time.monotonic() + 60
        while not sampler.has(0) and time.monotonic() < deadline:
            time.sleep(0.01)

    assert sampler.failure == "sampling failed: ValueError: no number"
