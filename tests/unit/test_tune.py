"""The search for settings, on a synthetic machine in place of a server."""

import json
import random
from dataclasses import dataclass, field

import pytest

from nereid.insight.tune import search
from nereid.insight.tune.load_generator import LoadResult
from nereid.insight.tune.tuning import TuneReport
from nereid.repository.pbtxt import parse
from tests.tables import cases

THROUGHPUT, LATENCY = search.Objective("throughput"), search.Objective("latency")
GRID = {"instances": (1, 2, 3, 4), "delay": (0, 1, 2, 3)}
POINTS = list(search.points(GRID, cores=4))


def load(rate: float, p99_ms: float = 10.0, p50_ms: float = 5.0) -> LoadResult:
    return LoadResult(rate, p50_ms, p99_ms, p99_ms, 100, 0)


@dataclass
class Machine:
    """A clock, and a server whose measurements take time; `noise` is a share of every rate.

    It rejects some candidates, each after this number of measurements.
    """

    noise: float = 0.0
    rejects: frozenset[search.CandidateSettings] = frozenset()
    after: int = 0
    p99_ms: float = 10.0
    now_s: float = 0.0
    measured: list[tuple[search.CandidateSettings, float, float]] = field(default_factory=list)
    draw: random.Random = field(default_factory=lambda: random.Random(1))

    def measure(self, candidate: search.CandidateSettings, seconds: float) -> dict[int, LoadResult]:
        self.now_s += 0.5 + 2 * seconds  # half a second beyond the load
        self.measured.append((candidate, seconds, self.now_s))
        if candidate in self.rejects and sum(other == candidate for other, *_ in self.measured) > self.after:
            raise search.NotMeasured("rejected")
        value = {"instances": 2, "delay": 2} | dict(candidate)
        rate = 100.0 - 10 * abs(value["instances"] - 3) - 5 * value["delay"]
        rate *= 1 + self.draw.uniform(-self.noise, self.noise)
        return {1: load(rate / 4, 2.0, 1e3 / rate), 8: load(rate, self.p99_ms, 1e3 / rate)}


def searched(machine: Machine, objective=THROUGHPUT, until_s: float = 300.0) -> TuneReport:
    searching = search.Search(machine.measure, objective, 2, lambda: machine.now_s, until_s)
    outcome = searching.run(search.sample(POINTS, GRID, search.MAX_CANDIDATES, 0, ()))
    default = (("instances", 2), ("delay", 2))
    return TuneReport("net", objective, default, *outcome, searching.seen, searching.failures)


def verdict(objective: search.Objective, default: list, default_repeat: list, best: list) -> str:
    """Return the verdict on a candidate after the final rounds."""
    candidate = (("instances", 3),)
    seen = {search.CURRENT_CONFIG: search.median(default), candidate: search.median(best)}
    final = search.FinalComparison(default, default_repeat, best)
    return TuneReport("net", objective, (), candidate, final, seen, {}).verdict


@pytest.mark.parametrize("objective", [THROUGHPUT, LATENCY], ids=["throughput", "latency"])
def test_best_of_the_surface_is_found(objective):
    result = searched(Machine(noise=0.01), objective)

    assert dict(result.best) == {"instances": 3, "delay": 0}
    assert result.final.gain(objective) == pytest.approx(100 / 80 - 1, abs=0.03)
    assert 0 < result.final.noise(objective) < 0.03
    assert result.verdict == "better"
    document = json.loads(json.dumps(result.document()))
    assert document["chosen"] == {"instances": 3, "delay": 0}
    assert sum(candidate["is_default"] for candidate in document["candidates"]) == 1


@pytest.mark.parametrize("until_s", [3.0, 20.0, 61.5])
def test_deadline_is_held(until_s):
    machine = Machine()

    result = searched(machine, until_s=until_s)

    assert machine.now_s <= until_s
    assert result.verdict in ("better", "kept")
    assert result.reason()


@cases(noise=((-3, 2, 4, -2, 3), "kept"), calm=((-0.3, 0.2, 0.4, -0.2, 0.3), "better"))
def test_gain_within_the_noise_keeps_the_default(strays, expected):
    default_repeat = [{1: load(100 + stray)} for stray in strays]

    assert verdict(THROUGHPUT, [{1: load(100)}] * 5, default_repeat, [{1: load(101)}] * 5) == expected


def test_p99_limits_the_concurrency_that_counts():
    sample = {1: load(40, 5), 8: load(90, 40), 32: load(100, 160)}

    assert search.Objective("throughput").concurrency(sample) == 32
    assert search.Objective("throughput", 50).concurrency(sample) == 8
    assert search.Objective("throughput", 1).concurrency(sample) == 1
    assert search.Objective("latency", 50).concurrency(sample) == 1


def test_missed_p99_is_infeasible():
    result = searched(Machine(p99_ms=500), search.Objective("throughput", 1.5))

    assert (result.verdict, result.document()["chosen"]) == ("infeasible", None)
    assert "expected p99 <= 1.5 ms, the best got 2.0 ms at concurrency 1 with" in result.reason()


@cases(
    no_time=(Machine(), 2.0, "there was no time for another candidate; fix: more --minutes"),
    little_time=(Machine(), 20.0, "there was time for 2 of 3 final rounds, too few to separate"),
    all_rejected=(
        Machine(rejects=frozenset(POINTS)),
        300.0,
        f"all {len(POINTS)} other candidates failed; the last one: rejected",
    ),
)
def test_search_without_a_comparison_keeps_the_default(machine, until_s, reason):
    result = searched(machine, until_s=until_s)

    assert (result.verdict, result.document()["chosen"]) == ("kept", None)
    assert result.reason().startswith(f"default kept: {reason}")
    assert len(result.document()["failed"]) == len(machine.rejects)


@pytest.mark.parametrize("rounds", [0, 4])
def test_best_that_fails_in_the_duel_is_not_chosen(rounds):
    whole = searched(machine := Machine())
    before = sum(candidate == whole.best for candidate, *_ in machine.measured) - len(whole.final.best)

    result = searched(Machine(rejects=frozenset({whole.best}), after=before + rounds))

    assert whole.best in result.failures
    assert (result.verdict, result.document()["chosen"]) == ("kept", None)
    reason = "default kept: instances 3, delay 0 was best, but failed in the final rounds: rejected"
    assert result.reason() == reason


LATE, NEAR = {1: load(120, 51)}, {1: load(120, 45)}


@cases(
    twice=([LATE, LATE, NEAR], [NEAR, NEAR, NEAR], "kept"),
    often=([LATE, LATE, NEAR], [NEAR, LATE, LATE], "kept"),
    always=([LATE, LATE, LATE], [LATE, LATE, LATE], "better"),
)
def test_default_that_rarely_misses_the_p99_still_counts(default, default_repeat, expected):
    """Only a faster default that nearly always misses the p99 is replaced by a candidate that meets it."""
    objective, best = search.Objective("throughput", 50), [{1: load(100, 49)}] * 3

    assert verdict(objective, default, default_repeat, best) == expected


def test_front_has_the_points_that_none_beats():
    a, b, c = (("x", 1),), (("x", 2),), (("x", 3),)
    seen = {
        a: {1: load(10, 5), 8: load(100, 50)},
        b: {1: load(9, 6), 8: load(100, 40)},
        c: {1: load(12, 30), 8: load(50, 40)},
    }

    assert search.pareto_front(seen) == [(b, 8), (c, 1), (a, 1)]


READS_IN_PROCESS = 'parameters { key: "networks" value { string_value: "in_process" } }'
BATCHES = "max_batch_size", "preferred_batch_size", "max_queue_delay_microseconds"
NETWORK, DECODER = {"instances", "intra_op_thread_count"}, {"instances", "decode_threads"}


@cases(
    fused=("max_batch_size: 8", "fused", {*NETWORK, "run_batch_size", *BATCHES}),
    no_batch=("", "onnxruntime", NETWORK),
    preprocess=("", "preprocess", DECODER),
    sequences=("max_batch_size: 8 sequence_batching {}", "preprocess", DECODER),
    reader=(READS_IN_PROCESS, "text_reader", NETWORK),
    gpu=("instance_group [ { kind: KIND_GPU } ]", "onnxruntime", {"instances"}),
    two_groups=("instance_group [ { count: 1 }, { count: 2 } ]", "python", set()),
)
def test_space_has_what_the_backend_reads(text, backend, names):
    assert search.space(parse(text), backend, cores=2).keys() == names


def test_no_candidate_takes_smaller_requests_than_before():
    """Clients may continue to send the largest batch of the present config."""
    assert search.space(parse("max_batch_size: 12"), "fused", cores=2)["max_batch_size"] == (12, 24)
    assert search.space(parse("max_batch_size: 1"), "fused", cores=2)["max_batch_size"] == (1, 8, 16)
