"""The default instances and batches compared with the best of `nereid tune`, on one core and on all cores.

The server, `nereid tune` and the load generator have the same cores.

    python -m loadtest.default_choice [--minutes 4] [--record default_choice]
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadtest import record
from loadtest.tune_proof import CONCURRENCY, tuned
from nereid import assets
from nereid.tune.trial import copy_repository

MAX_GAIN = 0.03
HEADINGS = ("cores", "best settings that `nereid tune` found", "their gain", "noise")


def best(cores: Sequence[int], minutes: float) -> record.Row:
    """Return the best settings that `nereid tune` finds on some cores, compared with the default ones."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            found = tuned(copy_repository(assets.REPOSITORY, Path(scratch) / "models"), minutes)
    finally:
        os.sched_setaffinity(0, everywhere)
    return {
        "cores": len(cores),
        "reason": found["reason"],
        "gain": round(found["gain"], 3),
        "noise": round(found["noise"], 3),
    }


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as a table of docs/tuning.md."""
    return record.markdown(
        HEADINGS,
        (
            (row["cores"], row["reason"].partition(";")[0], f"{row['gain']:+.1%}", f"±{row['noise']:.1%}")
            for row in rows
        ),
    )


def main() -> int:
    """Tune, print and record; exit status 1 if the default settings are more than 3 % slower."""
    args = record.parsed(record.parser(__doc__, minutes=4.0))
    cores = sorted(os.sched_getaffinity(0))
    rows = [best(cores[:size], args.minutes) for size in sorted({1, len(cores)})]
    print(markdown(rows))
    missed = [f"{row['cores']} core(s): {row['reason']}" for row in rows if row["gain"] > MAX_GAIN]
    return record.finish(args.record, {"concurrency": CONCURRENCY, "rows": rows}, missed)


if __name__ == "__main__":
    record.end(main)
