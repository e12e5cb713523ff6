"""`make docs`: write docs/benchmarks.md, its plots and the README's table from the recorded results.

python -m loadtest.bench.page
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest import memory, record, swap, trials
from loadtest.bench import summary, svg
from loadtest.bench.plan import ALONE, IN_PROCESS, PHOTOS
from nereid.assets import CHECKOUT

Record = dict[str, Any]
Row = dict[str, Any]

DOCS = CHECKOUT / "docs"
README = CHECKOUT / "README.md"
NAME = "bench"
PLOTS = {"bench-throughput.svg": svg.throughput, "bench-latency.svg": svg.latency}
SHORT = ("photo", "path", "images/s", "of the limit", "CPU ms per image", "p50 ms alone", "p99 ms of 32")
MARK = "<!-- Written by `make docs` from loadtest/results/bench.json. -->\n"
# Records of their own commands, and the page that has each.
ELSEWHERE = {
    "backend": "onnxruntime_backend.md",
    "clients": "clients.md",
    "gateway": "gateway.md",
    "memory": "onnxruntime_backend.md",
    "parity": "preprocess.md",
    "pieces": "onnxruntime_backend.md",
    "preprocess": "preprocess.md",
    "recovery": "supervision.md",
    "soak": "soak.md",
    "stall": "load_testing.md",
    "route": "routing.md",
    "swap": "publishing.md",
    "trials": "benchmarks.md",
    "tune_proof": "tuning.md",
}
HEAD = """# Benchmarks

Written by `make docs` from what `make bench` recorded; a test compares them.
"""
HOW = """
## How to read it

- **The limit** is the same library in process: one process per core with one thread, without a server, in
  the environment of the server's processes. Requests bring single images, so that is what paths are held
  to; batches of eight, the most that Triton forms, stand beside it. For `network`, which takes a tensor,
  it is the session's run.
- **Paths**: `cpu` (both steps in one process, the default profile) and `ensemble` are `classify_v1`
  (FP32) or `classify_v2` (INT8); `route` is `classify`, with a header that names the variant, and
  `gateway` the REST gateway before it, both in the profile `cpu`. Photos are JPEGs of 640x427 and
  1920x1080.
- **Load** is closed: so many requests are in flight all the time, by `wrk`, or by NVIDIA's
  `perf_analyzer`, which speaks both protocols. The generator has its share of the same cores. Under
  `wrk`, images per second are what the server counts while answers flow: a generator's own count begins
  before the first answer. For arrivals that do not wait for answers see the open loop of the
  [gateway](gateway.md).
- Every round measures each line once, in turn, every other round backwards. Shown are medians over the
  rounds; **of the limit** is the median of the rounds' own ratios, so that a slow phase of the machine
  hits both alike.
- **CPU ms** is CPU time per image of the server's whole process tree (of the workers, in process),
  counted over exactly the images that the server says it answered. What else the machine does changes it
  less than it changes throughput.
- **p99 of even** is p99 by (requests in flight / throughput): 1 would be requests that all wait alike.
- **memory** is PSS of the tree, right after the load: pages that processes share count once.
"""


TRIED = """Kept is what the repository has. A queue policy is what Triton asks for to honour a request's own
`timeout`. With one it forms no batch before an instance waits for it, and overlooks some that wait, so that
instances stand still while requests do: a single one for half of the time. Ours have none: a route's
deadlines go in a [parameter](routing.md). Larger batches answer no more and have a longer p99 at 8 in flight,
single images cost CPU; those of two and four even out the ensemble as well, which does not have them yet.
UINT8 between preprocessing and network spares the ensemble copies through shared memory, but needs another
file of the network and pays little. One instance whose own threads answer through response senders, image by
image, was tried by hand: it took more CPU than two instances, and what is on its way when its process dies is
never answered.
"""


def render(bench: Record, others: Mapping[str, Record]) -> str:
    """Return the page of the benchmark's record and, by name, the records of other commands."""
    parts = [
        HEAD,
        _conditions(bench),
        "".join(f"\n- {note}\n" for note in bench["notes"]),
        _targets(bench["targets"]),
        "".join(f"\n![{_alt(name)}]({name})\n" for name in PLOTS),
        HOW,
        "\n## Noise\n\n",
        _noise(bench),
        "\n## Every measurement\n\n",
        record.markdown(summary.HEADINGS, map(summary.cells, bench["rows"])),
        _pieces(bench),
        _trials(others["trials"]),
        _shared(others["memory"]),
        _published(others["swap"]),
        _others(others),
    ]
    return "".join(parts)


def conditions(result: Record) -> str:
    """Return machine and date as every page names them."""
    machine = result["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {result['date'][:10]}"


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
    rows = [(each["what"], each["wanted"], each["got"], "yes" if each["met"] else "no") for each in targets]
    return "\n## Targets\n\n" + record.markdown(("", "asked for", "measured", "met"), rows)


def _noise(bench: Record) -> str:
    if not bench["noise"]:
        return "Not measured in this run.\n"
    rows = [
        (name.replace("_", " "), values["median"], f"{values['min']}..{values['max']}")
        for name, values in bench["noise"].items()
    ]
    text = (
        "The same (`cpu`, the small photo, 32 in flight) was measured twice in every round; the second by\n"
        "the first. What differs from the limit by less than this may not differ at all.\n\n"
    )
    return text + record.markdown(("second by first", "median", "least..most"), rows)


def _pieces(bench: Record) -> str:
    if "pieces_ms" not in bench:
        return ""
    found = bench["pieces_ms"]
    names = next(iter(found.values()))
    table = record.markdown(
        ("ms per image", *(f"malloc thresholds {malloc}" for malloc in found)),
        ((name, *(values[name] for values in found.values())) for name in names),
    )
    starts = [
        (profile, *(f"{times[name]['median']:.2f}" for name in ("first_answer_s", "every_model_s")))
        for profile, times in bench["cold_start"].items()
    ]
    cold = record.markdown(("profile", "s until a first answer", "s until every model has answered"), starts)
    return (
        "\n## The library's parts\n\nOn all cores at once: memory that is kept or new, and normalising each\n"
        "plane while it is in the cache, or all at once.\n\n"
        f"{table}\n## Cold start\n\nFrom the start of the process.\n\n{cold}"
    )


def _trials(tried: Record) -> str:
    return (
        "\n## What was tried\n\nEach is the repository with one thing changed, beside the profile as it is,\n"
        f"in the same rounds: the small photo, FP32, `wrk` ({conditions(tried)}; `{tried['command']}`).\n\n"
        f"{trials.markdown(tried['rows'])}\n{TRIED}"
    )


def _shared(shared: Record) -> str:
    return (
        f"\n## Shared against private weights\n\n{conditions(shared)}, "
        f"see [ONNX backend]({ELSEWHERE['memory']}).\n\n{memory.markdown(shared['rows'])}"
    )


def _published(swapped: Record) -> str:
    return (
        f"\n## Publishing under load\n\n{conditions(swapped)}; a publication takes {swapped['publish_s']} s "
        f"under that load, see [publishing]({ELSEWHERE['swap']}).\n\n{swap.markdown(swapped['rows'])}"
    )


def _others(others: Mapping[str, Record]) -> str:
    rows = [
        (f"[{name}.json](../loadtest/results/{name}.json)", f"`{each['command']}`", _page(name))
        for name, each in sorted(others.items())
    ]
    return f"\n## Other records\n\n{record.markdown(('record', 'command', 'page'), rows)}"


def _page(name: str) -> str:
    page = ELSEWHERE.get(name)
    return f"[{page}]({page})" if page else ""


def _alt(name: str) -> str:
    return f"plot: {name.removeprefix('bench-').removesuffix('.svg')}"


def readme_section(bench: Record) -> str:
    """Return the README's table, and the line that tells its conditions."""
    rows: list[Sequence[object]] = []
    for photo, size in PHOTOS.items():
        rows += [_short(bench["rows"], photo, size, path) for path in (IN_PROCESS, "cpu", "ensemble")]
    missed = sum(not each["met"] for each in bench["targets"])
    met = f"{len(bench['targets']) - missed} of its {len(bench['targets'])} targets are met"
    if bench["noise"]:
        met += f";\nthe same measured twice per round gave {bench['noise']['rate']['median']} times itself"
    return (
        f"{MARK}Medians of rounds that interleave all paths ({conditions(bench)};\n"
        f"`{bench['command']}`; {met};\n"
        "[all numbers, and how they came about](docs/benchmarks.md)):\n\n"
        f"{record.markdown(SHORT, rows)}"
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


def in_readme(text: str, section: str) -> str:
    """Return the README with its table replaced: from the mark to the end of the table."""
    pattern = re.escape(MARK) + r"[^|]*\n\n(\|.*\n)+"
    replaced, count = re.subn(pattern, lambda _: section, text)
    if count != 1:
        raise ValueError(f"the README has {count} places for the table, expected 1 behind: {MARK}")
    return replaced


def pages() -> dict[Path, str]:
    """Return all that is written of the recorded results."""
    found: dict[str, Record] = {
        path.stem: json.loads(path.read_text()) for path in record.RESULTS.glob("*.json")
    }
    bench = found.pop(NAME)
    return {
        DOCS / "benchmarks.md": render(bench, found),
        README: in_readme(README.read_text(), readme_section(bench)),
        **{DOCS / name: draw(bench["rows"]) for name, draw in PLOTS.items()},
    }


def main() -> None:
    """Write them."""
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
