"""The default instances and batches compared with the best of `nereid tune`, on one core and on all cores.

The server, `nereid tune` and the load generator have the same cores. The best of many settings is partly
lucky, so they are compared with the default ones in separate rounds.

    python -m loadtest.default_choice [--minutes 4] [--rounds 12] [--seconds 4] [--record default_choice]
"""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest import record
from loadtest.tune_proof import CONCURRENCY, MODEL, PROFILE, measured, tuned
from nereid import assets
from nereid.tune.profiles import tunable
from nereid.tune.space import DEFAULT, Candidate
from nereid.tune.trial import TrialServer, copy_repository

MIN_SHARE = 0.97
HEADINGS = ("cores", "best settings that `nereid tune` found", "default / best", "min..max")


def compared(cores: Sequence[int], minutes: float, rounds: int, seconds: float) -> record.Row:
    """Tune on some cores; returns the rate of the default settings as a share of the best ones."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            repository = copy_repository(assets.REPOSITORY, Path(scratch) / "models")
            found = tuned(repository, minutes)
            best = _best(found)
            shares = _shares(repository, Path(scratch), best, rounds, seconds)
    finally:
        os.sched_setaffinity(0, everywhere)
    changed = dict(best).items() - found["default"].items()
    return {
        "cores": len(cores),
        "best": ", ".join(f"{name} {value}" for name, value in sorted(changed)),
        "reason": found["reason"],
        **record.spread(shares, 3),
    }


def _best(found: Mapping[str, Any]) -> Candidate:
    if found["chosen"]:
        return tuple(found["chosen"].items())
    others = [each for each in found["candidates"] if not each["is_default"]]
    if not others:
        sys.exit("nereid tune had no time for another candidate; fix: a larger --minutes")
    best = max(others, key=lambda each: float(each["loads"][f"{CONCURRENCY}"]["rate"]))
    return tuple(best["settings"].items())


def _shares(repository: Path, scratch: Path, best: Candidate, rounds: int, seconds: float) -> list[float]:
    base = tunable(repository, MODEL, PROFILE)
    (folder := scratch / "trial").mkdir()
    with TrialServer(repository, base, (), [CONCURRENCY], folder, os.environ) as trial:
        done = measured(trial.measure, [DEFAULT, best], rounds, seconds)
    shares = [each[DEFAULT] / each[best] for each in done if {DEFAULT, best} <= each.keys()]
    if not shares:
        sys.exit(f"no round has both the default settings and {dict(best)}")
    return shares


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as a table of docs/tuning.md."""
    return record.markdown(
        HEADINGS,
        ((row["cores"], row["best"], row["median"], f"{row['min']}..{row['max']}") for row in rows),
    )


def main() -> int:
    """Tune, compare, print and record; exit status 1 if the default settings are more than 3 % slower."""
    args = record.parsed(record.parser(__doc__, minutes=4.0, rounds=12, seconds=4.0))
    cores = sorted(os.sched_getaffinity(0))
    sizes = sorted({1, len(cores)})
    rows = [compared(cores[:size], args.minutes, args.rounds, args.seconds) for size in sizes]
    print(markdown(rows))
    missed = [f"{row['cores']} core(s): {row['median']}" for row in rows if row["median"] < MIN_SHARE]
    conditions = {"concurrency": CONCURRENCY, "rounds": args.rounds, "seconds": args.seconds}
    return record.finish(args.record, conditions | {"rows": rows}, missed)


if __name__ == "__main__":
    record.end(main)
