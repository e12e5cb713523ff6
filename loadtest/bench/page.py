"""Write docs/benchmarks.md, and tables of two other pages, from the records; part of `make docs`.

python -m loadtest.bench.page
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from loadtest import record
from loadtest.bench import summary
from loadtest.bench.plan import ALONE, IN_PROCESS, PHOTOS, WRK
from loadtest.record import Row
from nereid.assets import CHECKOUT

Record = Row

DOCS = CHECKOUT / "docs"
README, PERFORMANCE = CHECKOUT / "README.md", DOCS / "performance.md"
NAME = "bench"
SHORT = ("photo", "path", "images/s", "of the limit", "CPU ms per image", "p50 ms alone", "p99 ms of 32")
MARK = "<!-- Written by `make docs` from loadtest/results/bench.json. -->\n"
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
    "gpu_check": "gpu.md",
    "mutated_files": "security.md",
    "reading_accuracy": "reading.md",
    "reading_speed": "reading.md",
    "recovery": "server.md",
    "rollout_simulation": "rollouts.md",
    "soak": "performance.md",
}
HEAD = """# Benchmarks

`make docs` generates this page from the records of `make bench`.
"""
HOW = """
## How to read it

- **The limit** is the same library in process, without a server: one process per core, with one thread each.
  It runs one image at a time, as the requests do. Batches of eight, the largest that Triton forms, have
  separate rows. For `network`, which takes a tensor, the limit is the session's run.
- **Paths**: `cpu` runs both steps in one process and is the default without a GPU; `ensemble` runs them in
  two processes. Both serve `classify_v1` (FP32) and `classify_v2` (INT8). `route` is `classify` with a header
  that names the variant, and `gateway` is the REST gateway in front of it; both use the profile `cpu`.
  `by-hand` is a 50-line service with the same decoder and session, [Starlette](https://www.starlette.io)
  and uvicorn. The difference is the cost of everything else that Nereid does.
- **Photos** are JPEGs of 640x427 (small) and 1920x1080 (1080p).
- **Load** is a closed loop by `wrk`, which shares the cores with the server. Images per second are counted by
  the server while responses flow, because the generator starts counting before the first response. The rows
  with `perf_analyzer` come from an earlier version of the program; [load
  tests](performance.md#run-a-load-test) now measure gRPC and HTTP.
- Each round measures each row once, and odd rounds run in reverse order. The table shows medians over the
  rounds. **Of the limit** is the median of the per-round ratios, so a slow phase of the machine affects
  both alike.
- **CPU ms** is the CPU time per image of the server's process tree, or of the workers in process. It
  covers exactly the images that the server reports as answered.
- **p99 of even** is p99 / (requests in flight / throughput), which is 1 if all requests wait equally long.
- **memory** is the PSS of the process tree right after the load, which counts a shared page once.
"""
NOISE = """The A/A measurement runs `cpu` with the small photo and 32 requests in flight twice in every round.
The table shows the ratio of the second to the first. Smaller differences from the limit are noise.

"""


def render(bench: Record, others: Mapping[str, Record]) -> str:
    """Return the page of the benchmark's record and, by name, the records of other commands."""
    parts = [
        HEAD,
        _conditions(bench),
        "".join(f"\n- {note}\n" for note in bench["notes"]),
        _targets(bench["targets"]),
        HOW,
        "\n## Noise\n\n",
        _noise(bench),
        "\n## Every measurement\n\n",
        record.markdown(summary.HEADINGS, map(summary.cells, bench["rows"])),
        _others(others),
    ]
    return "".join(parts)


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


def _conditions(bench: Record) -> str:
    versions = {"Python": bench["machine"]["python"], **bench["tools"], **bench["packages"]}
    rows = [
        ("machine", conditions(bench)),
        ("commit", bench["commit"]),
        ("command", f"`{bench['command']}`"),
        ("rounds", f"{bench['rounds']}, each measurement {bench['seconds']:g} s"),
        ("load of the machine before", bench["load_before"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("malloc", ", ".join(f"`{name}={value}`" for name, value in bench["environment"].items())),
        ("record", f"[{NAME}.json](../loadtest/results/{NAME}.json)"),
    ]
    return "\n" + record.markdown(("", ""), rows)


def _targets(targets: Sequence[Row]) -> str:
    rows = [
        (each["what"], each["wanted"], f"{each['got']}{'' if each['met'] else ' (missed)'}")
        for each in targets
    ]
    return "\n## Targets\n\n" + record.markdown(("measure", "target", "measured"), rows)


def _noise(bench: Record) -> str:
    if not bench["noise"]:
        return "This run has no A/A measurement.\n"
    rows = [
        (name.replace("_", " "), values["median"], f"{values['min']}..{values['max']}")
        for name, values in bench["noise"].items()
    ]
    return NOISE + record.markdown(("second / first", "median", "min..max"), rows)


def _others(others: Mapping[str, Record]) -> str:
    rows = [
        (f"[{name}.json](../loadtest/results/{name}.json)", command_text(each), f"[{page}]({page})")
        for name, each in sorted(others.items())
        for page in [ELSEWHERE[name]]
    ]
    return f"\n## Other records\n\n{record.markdown(('record', 'command', 'page'), rows)}"


def readme_section(bench: Record) -> str:
    """Return the README's table, and the lines with its conditions."""
    rows: list[Sequence[object]] = []
    for photo, size in PHOTOS.items():
        rows += [_short(bench["rows"], photo, size, path) for path in (IN_PROCESS, "cpu", "ensemble")]
    total, met = len(bench["targets"]), sum(each["met"] for each in bench["targets"])
    noise = f" The A/A ratio was {bench['noise']['rate']['median']}." if bench["noise"] else ""
    return (
        f"{MARK}Medians of interleaved rounds ({conditions(bench)};\n"
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
    for (path, photo, precision), found in groups.items():
        best = max(found, key=lambda row: float(row["rate"]["median"]))
        cpu_ms, rate = best["cpu_ms"]["median"], best["rate"]["median"]
        predicted = cores * 1e3 / cpu_ms
        rows.append(
            (
                *(f"`{path}`", PHOTOS[photo], precision, f"{cpu_ms:.2f}", f"{1e3 / cpu_ms:.0f}"),
                *(f"{predicted:.0f}", f"{rate:.0f}", f"{rate / predicted:.2f}"),
            )
        )
    return (
        f"{MARK}Cost of an image on {cores} cores, at the best concurrency ({conditions(bench)};\n"
        f"`{bench['command']}`).\n\n{record.markdown(COST, rows)}"
    )


def _short(rows: Iterable[Row], photo: str, size: str, path: str) -> Sequence[object]:
    mine = [row for row in summary.plain(rows) if row["photo"] == photo]
    if path == IN_PROCESS:
        limit = next(row for row in mine if row["path"] == IN_PROCESS)
        alone = next(row for row in mine if row["path"] == ALONE)
        return (
            *(size, path, f"{limit['rate']['median']:.0f}", "1"),
            *(f"{limit['cpu_ms']['median']:.2f}", f"{alone['p50_ms']['median']:.1f}", ""),
        )
    mine = [row for row in mine if row["path"] == path]
    best = summary.best(mine)
    one, many = (next(row for row in mine if row["concurrency"] == count) for count in (1, 32))
    return (
        *(size, f"`{path}`", f"{best['rate']['median']:.0f}", f"{best['of_limit']['median']:.3f}"),
        *(f"{best['cpu_ms']['median']:.2f}", f"{one['p50_ms']['median']:.1f}"),
        f"{many['p99_ms']['median']:.0f}",
    )


def with_section(path: Path, section: str) -> str:
    """Return a page with its table replaced: from the mark to the end of the table."""
    pattern = re.escape(MARK) + r"[^|]*\n\n(\|.*\n)+"
    replaced, count = re.subn(pattern, lambda _: section, path.read_text())
    if count != 1:
        raise ValueError(f"{path.name}: expected 1 place for the table after {MARK.strip()}, got {count}")
    return replaced


def pages() -> dict[Path, str]:
    """Return all texts that are written from the records."""
    found: dict[str, Record] = {
        path.stem: json.loads(path.read_text()) for path in record.RESULTS.glob("*.json")
    }
    bench = found.pop(NAME)
    return {
        DOCS / "benchmarks.md": render(bench, found),
        README: with_section(README, readme_section(bench)),
        PERFORMANCE: with_section(PERFORMANCE, cost_section(bench)),
    }


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
