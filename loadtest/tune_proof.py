"""A proof that `nereid tune` finds good settings: a spoiled config is tuned and compared with a full grid.

In a copy of the repository one variant gets more threads than cores, no batches and a queue that waits.
Interleaved rounds compare the tuned settings with all points of a grid. The best of many points is partly
lucky, so the result is its ratio to the tuned settings in separate rounds.

    python -m loadtest.tune_proof [--minutes 8] [--rounds 5] [--seconds 2] [--record tune_proof]
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from loadtest import record
from nereid import assets
from nereid.tune.profiles import DELAY, INSTANCES, MAX_BATCH_SIZE, PREFERRED, tunable, with_settings
from nereid.tune.search import Measure, NotMeasured
from nereid.tune.space import THREADS, Candidate
from nereid.tune.trial import TrialServer, copy_repository

MODEL, PROFILE, CONCURRENCY = "classify_v1", "cpu", 32
# One instance pauses for 0.5 s at times (docs/tuning.md), so the spoiled config has two.
BAD = {INSTANCES: 2, THREADS: 2, MAX_BATCH_SIZE: 1, PREFERRED: 0, DELAY: 20_000}
GRID = {INSTANCES: (2, 3), THREADS: (1, 2), MAX_BATCH_SIZE: (1, 8), DELAY: (0, 20_000)}
TARGET = 0.95
HEADINGS = ("settings", "images/s", "min..max", "of the tuned")
TUNED_NAME = "tuned"

# Images per second of each measured candidate: in one round, and over all rounds.
Round: TypeAlias = dict[Candidate, float]
Series: TypeAlias = dict[Candidate, list[float]]


def spoil(repository: Path, settings: Mapping[str, int] = BAD) -> None:
    """Write bad settings into the config of the variant."""
    path = repository / MODEL / "configs" / f"{PROFILE}.pbtxt"
    path.write_text(with_settings(path.read_text(), settings))


def tuned(repository: Path, minutes: float, *options: str) -> dict[str, Any]:
    """Run `nereid tune` on a repository; returns its JSON output."""
    words = [sys.executable, "-m", "nereid", "tune", MODEL, "--repository", str(repository), "--json"]
    words += ["--minutes", str(minutes), "--profile", PROFILE]
    words += ["--concurrency", str(CONCURRENCY), *options]
    return dict(json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout))


def grid() -> list[Candidate]:
    """Return all points of the grid."""
    return [tuple(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]


def measured(measure: Measure, candidates: Sequence[Candidate], rounds: int, seconds: float) -> list[Round]:
    """Measure all candidates in every round; a failed one is reported, and missing in that round."""
    done: list[Round] = []
    for number in range(rounds):
        done.append({})
        for candidate in record.turns(candidates, number):
            try:
                done[-1][candidate] = measure(candidate, seconds)[CONCURRENCY].rate
            except NotMeasured as error:
                print(f"round {number + 1}, not measured: {described(candidate)}: {error}", file=sys.stderr)
    return done


def series_of(rounds: Sequence[Round]) -> Series:
    """Return the rates of each candidate over the rounds."""
    candidates = dict.fromkeys(candidate for each in rounds for candidate in each)
    return {candidate: [each[candidate] for each in rounds if candidate in each] for candidate in candidates}


def described(candidate: Candidate) -> str:
    """List the settings of a candidate."""
    return ", ".join(f"{name} {value}" for name, value in candidate)


def summarise(series: Series, chosen: Candidate) -> list[record.Row]:
    """Return a row per candidate, by falling rate."""
    base = statistics.median(series[chosen])
    rows = [
        {
            "settings": described(candidate),
            "is_tuned": candidate == chosen,
            **record.spread(rates, 1),
            "of_tuned": round(statistics.median(rates) / base, 3),
        }
        for candidate, rates in series.items()
    ]
    return sorted(rows, key=lambda row: -float(row["median"]))


def best_of(series: Series, chosen: Candidate) -> Candidate:
    """Return the best point of the grid.

    Raises:
        NotMeasured: the tuned settings or all points of the grid failed.
    """
    if chosen not in series or len(series) == 1:
        raise NotMeasured("the tuned config, or every point of the grid, failed in all rounds")
    return max((each for each in series if each != chosen), key=lambda each: statistics.median(series[each]))


def ratio(rounds: Sequence[Round], chosen: Candidate, best: Candidate) -> float:
    """Return the tuned rate as a share of the best one: the median over rounds that have both.

    Raises:
        NotMeasured: no round has both.
    """
    shares = [each[chosen] / each[best] for each in rounds if {chosen, best} <= each.keys()]
    if not shares:
        raise NotMeasured("no round has both the tuned config and the best point of the grid")
    return round(statistics.median(shares), 3)


def compare(
    measure: Measure, chosen: Candidate, rounds: int, seconds: float
) -> tuple[list[record.Row], float]:
    """Compare the tuned settings with the grid; returns the rows, and the share of the best point's rate.

    Raises:
        NotMeasured: too many measurements failed.
    """
    series = series_of(measured(measure, [chosen, *grid()], rounds, seconds))
    best = best_of(series, chosen)
    again = measured(measure, [chosen, best], 2 * rounds, seconds)
    return summarise(series, chosen), ratio(again, chosen, best)


def _cells(row: record.Row) -> list[str]:
    name = f"**{TUNED_NAME}**: {row['settings']}" if row["is_tuned"] else row["settings"]
    return [name, str(row["median"]), f"{row['min']}..{row['max']}", str(row["of_tuned"])]


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as the table of docs/tuning.md."""
    return record.markdown(HEADINGS, map(_cells, rows))


def main() -> int:
    """Tune, measure, print and record; exit status 1 if the best grid point is better by more than 5 %."""
    args = record.parsed(record.parser(__doc__, minutes=8.0, rounds=5, seconds=2.0))
    with tempfile.TemporaryDirectory() as scratch:
        repository = copy_repository(assets.REPOSITORY, Path(scratch) / "models")
        spoil(repository)
        base = tunable(repository, MODEL, PROFILE)
        found = tuned(repository, args.minutes)
        print(found["reason"])
        if found["verdict"] != "better":
            sys.exit("nereid tune found nothing better than the spoiled config")
        chosen: Candidate = tuple(found["chosen"].items())
        (folder := Path(scratch) / "trial").mkdir()
        with TrialServer(repository, base, (), [CONCURRENCY], folder, os.environ) as trial:
            try:
                rows, share = compare(trial.measure, chosen, args.rounds, args.seconds)
            except NotMeasured as error:
                sys.exit(str(error))
    print(markdown(rows))
    print(f"tuned / best grid point, measured again: {share}")
    result = {key: found[key] for key in ("reason", "chosen", "gain", "noise")}
    conditions = {"concurrency": CONCURRENCY, "rounds": args.rounds, "share": share}
    missed = [f"{share} of the best grid point, the target is {TARGET}"] if share < TARGET else []
    return record.finish(args.record, conditions | result | {"rows": rows}, missed)


if __name__ == "__main__":
    record.end(main)
