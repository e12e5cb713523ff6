"""Write the tables of docs/benchmarks.md and of two other pages from the records; part of `make docs`.

python -m loadtest.bench.page
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from loadtest import record
from loadtest.bench import summary
from loadtest.bench.plan import ALONE, IN_PROCESS, PHOTOS, WRK
from loadtest.record import Row
from nereid.base.assets import CHECKOUT

Record = Row

DOCS = CHECKOUT / "docs"
README, BENCHMARKS, PERFORMANCE = CHECKOUT / "README.md", DOCS / "benchmarks.md", DOCS / "performance.md"
NAME = "bench"
SHORT = ("photo", "path", "images/s", "of the limit", "CPU ms per image", "p50 ms alone", "p99 ms of 32")
MARK = "<!-- Written by `make docs` from loadtest/results/bench.json. -->\n"
TARGETS: record.Columns = {
    "measure": "{what}",
    "target": "{wanted}",
    "measured": lambda row: f"{row['got']}{'' if row['met'] else ' (missed)'}",
}
COST = (
    *("path", "photo", "precision", "CPU ms per image", "images/s per core"),
    *("predicted", "measured", "ratio"),
)
# The present form of a command in an older record; records are never edited.
COMMANDS = {
    "python -m loadtest.soak": "python -m loadtest.torture",
    "python -m loadtest.chaos": "python -m loadtest.torture --rounds 200",
}
# The pages of the other records.
ELSEWHERE = {
    "attack": "security.md",
    "chaos": "performance.md",
    "gpu_check": "gpu_results.md",
    "mutated_files": "security.md",
    "mutated_pages": "security.md",
    "reading_accuracy": "reading.md",
    "reading_speed": "reading.md",
    "recovery": "server.md",
    "rollout_simulation": "rollouts.md",
    "soak": "performance.md",
}


def tables(bench: Record, others: Mapping[str, Record]) -> list[str]:
    """Return the tables of docs/benchmarks.md: the benchmark's, and the records of other commands by name."""
    noise = [
        (name.replace("_", " "), values["median"], f"{values['min']}..{values['max']}")
        for name, values in (bench["noise"] or {}).items()
    ]
    return [
        record.markdown(("", ""), _conditions(bench)),
        record.table(TARGETS, bench["targets"]),
        record.markdown(("second / first", "median", "min..max"), noise),
        record.markdown(summary.HEADINGS, map(summary.cells, bench["rows"])),
        record.markdown(("record", "command", "page"), _others(others)),
    ]


def conditions(result: Record) -> str:
    """Return machine and date as all pages name them."""
    machine = result["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {result['date'][:10]}"


def command_text(result: Record) -> str:
    """Return the recorded command; an old command is followed by its present form."""
    command: str = result["command"]
    for old, new in COMMANDS.items():
        if command.startswith(old):
            return f"recorded with `{command}`; today: `{command.replace(old, new, 1)}`"
    return f"`{command}`"


def _conditions(bench: Record) -> list[tuple[str, object]]:
    versions = {"Python": bench["machine"]["python"], **bench["tools"], **bench["packages"]}
    return [
        ("machine", conditions(bench)),
        ("commit", bench["commit"]),
        ("command", f"`{bench['command']}`"),
        ("rounds", f"{bench['rounds']}, each measurement {bench['seconds']:g} s"),
        ("load of the machine before", bench["load_before"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("malloc", ", ".join(f"`{name}={value}`" for name, value in bench["environment"].items())),
        ("record", f"[{NAME}.json](../loadtest/results/{NAME}.json)"),
        *(("note", note) for note in bench["notes"]),
    ]


def _others(others: Mapping[str, Record]) -> Iterator[Sequence[object]]:
    for name, other in sorted(others.items()):
        page = ELSEWHERE[name]
        link = f"[{name}.json](../loadtest/results/{name}.json)"
        yield link, command_text(other), f"[{page}]({page})"


def readme_section(bench: Record) -> str:
    """Return the README's table, and the lines with its conditions."""
    rows: list[Sequence[object]] = []
    for photo, size in PHOTOS.items():
        rows += [_short(bench["rows"], photo, size, path) for path in (IN_PROCESS, "cpu", "ensemble")]
    total, met = len(bench["targets"]), sum(target["met"] for target in bench["targets"])
    noise = f" The A/A ratio was {bench['noise']['rate']['median']}." if bench["noise"] else ""
    return (
        f"Medians of interleaved rounds ({conditions(bench)};\n"
        f"`{bench['command']}`).\n"
        f"{met} of {total} targets are met.{noise}\n"
        "See [all numbers](docs/benchmarks.md).\n\n"
        f"{record.markdown(SHORT, rows)}"
    )


def cost_section(bench: Record) -> str:
    """Return the table of docs/performance.md with the cost of an image, and its conditions."""
    cores, groups = bench["machine"]["cores"], dict[tuple[str, str, str], list[Row]]()
    for row in bench["rows"]:
        if row["generator"] == WRK and row["photo"] in PHOTOS and row["concurrency"] > cores:
            groups.setdefault((row["path"], row["photo"], row["precision"]), []).append(row)
    rows: list[Sequence[object]] = []
    for (path, photo, precision), group in groups.items():
        best = max(group, key=lambda row: float(row["rate"]["median"]))
        cpu_ms, rate = best["cpu_ms"]["median"], best["rate"]["median"]
        predicted = cores * 1e3 / cpu_ms
        rows.append(
            (
                *(f"`{path}`", PHOTOS[photo], precision, f"{cpu_ms:.2f}", f"{1e3 / cpu_ms:.0f}"),
                *(f"{predicted:.0f}", f"{rate:.0f}", f"{rate / predicted:.2f}"),
            )
        )
    return (
        f"Cost of an image on {cores} cores, at the best concurrency ({conditions(bench)};\n"
        f"`{bench['command']}`).\n\n{record.markdown(COST, rows)}"
    )


def _short(rows: Iterable[Row], photo: str, size: str, path: str) -> Sequence[object]:
    plain = [row for row in rows if summary.cell_of(row).is_plain and row["photo"] == photo]
    mine = {row["concurrency"]: row for row in plain if row["path"] == path}
    best, p99, ratio, name = next(iter(mine.values())), "", "1", path
    (alone,) = (row for row in plain if row["path"] == ALONE)
    if path != IN_PROCESS:
        best, alone, name = summary.best([*mine.values()]), mine[1], f"`{path}`"
        p99, ratio = f"{mine[32]['p99_ms']['median']:.0f}", f"{best['of_limit']['median']:.3f}"
    numbers = f"{best['rate']['median']:.0f}", ratio, f"{best['cpu_ms']['median']:.2f}"
    return size, name, *numbers, f"{alone['p50_ms']['median']:.1f}", p99


def pages() -> dict[Path, str]:
    """Return all texts that are written from the records."""
    records: dict[str, Record] = {
        path.stem: json.loads(path.read_text()) for path in record.RESULTS.glob("*.json")
    }
    bench, benchmarks = records.pop(NAME), BENCHMARKS.read_text()
    for table in tables(bench, records):
        heading, rest = table.split("\n", 1)
        benchmarks = record.with_section(benchmarks, f"{heading}\n", rest)
    return {
        BENCHMARKS: benchmarks,
        README: record.with_section(README.read_text(), MARK, readme_section(bench)),
        PERFORMANCE: record.with_section(PERFORMANCE.read_text(), MARK, cost_section(bench)),
    }


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
