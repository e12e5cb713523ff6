"""What a route costs: the same photos through it and straight to its variant, in one run.

In every round each profile's variant is asked directly, through the route, and through a route that mirrors
all to the other variant. That must cost nothing that counts: under saturation a shadow is shed.

    python -m loadtest.route [--rounds 5] [--seconds 4]       needs `wrk` (Debian: apt-get install wrk)
"""

import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtest import record, servers, wrk
from nereid import assets, metrics_page
from nereid.server.embedded_server import infer_path
from nereid.server.ports import Ports
from nereid.tune import photos

PROFILES = ("ensemble", "cpu")
# A JPEG of 200 kB.
SIZE_WH = (1040, 694)
CONCURRENCY = 32
VARIANT, SHADOW = "classify_v1", "classify_v2"
DIRECT, ROUTE, SHADOWED = "direct", "route", "route with a shadow"
MODELS = {DIRECT: VARIANT, ROUTE: "classify", SHADOWED: "shadowed"}
TO_VARIANT = {"x-variant": "v1"}
HEADINGS = ("profile", "path", "unit", "median", "compared", "with")
# More milliseconds at concurrency 1, the share of the throughput, the factor of p99 with a shadow at 100 %.
TARGETS = {"ms (p50)": 1.0, "images/s": 0.90, "ms (p99)": 1.10}

Series = dict[tuple[str, str, str], list[float]]


def copy_repository(target: Path) -> Path:
    """Copy the model repository, with one more route that mirrors every request."""
    shutil.copytree(assets.REPOSITORY, target)
    shutil.copytree(target / "classify", target / "shadowed")
    config = target / "shadowed" / "config.pbtxt"
    config.write_text(config.read_text().replace('"classify', '"shadowed'))
    route = json.loads((target / "classify.route.json").read_text())
    route["shadows"] = [{"name": "all", "model": SHADOW, "version": 1, "percent": 100}]
    (target / "shadowed.route.json").write_text(json.dumps(route))
    return target


@contextlib.contextmanager
def _servers(repository: Path, folder: Path) -> Iterator[dict[str, Ports]]:
    with contextlib.ExitStack() as stack:
        ports = {}
        for profile in PROFILES:
            server = stack.enter_context(servers.served(folder, os.environ, profile, repository))
            ports[profile] = server.options.ports
        yield ports


def _measure_round(ports: dict[str, Ports], photo: Path, seconds: float, series: Series) -> None:
    for profile, each in ports.items():
        for path, model in MODELS.items():
            # Before each saturating run: none begins behind what the one before has left in the queues.
            alone = wrk.post(each.http, infer_path(model), photo, 1, seconds, TO_VARIANT)
            series[profile, path, "ms (p50)"].append(alone.p50_ms)
            load = wrk.post(each.http, infer_path(model), photo, CONCURRENCY, seconds, TO_VARIANT)
            series[profile, path, "images/s"].append(load.rate)
            series[profile, path, "ms (p99)"].append(load.p99_ms)


def _shed_share(metrics_port: int) -> float:
    """Return the share of requests that were not mirrored because others waited.

    Raises:
        SystemExit: none is counted at all, so what was measured had no shadow.
    """
    page = metrics_page.fetch("127.0.0.1", metrics_port, timeout_s=10)
    counts: Counter[str] = Counter()
    for sample in metrics_page.parse(page):
        if sample.name == "nereid_route_shadow_requests_total":
            counts[sample.labels["outcome"]] += int(sample.value)
    if not counts.total():
        raise SystemExit("the server counts no request for a shadow, so nothing can be told of one")
    return counts["shed"] / counts.total()


def summarise(series: Series) -> list[dict[str, Any]]:
    """Return a row per profile, path and unit: the median, and the median of the rounds' comparisons."""
    rows = []
    for (profile, path, unit), values in series.items():
        base = {ROUTE: DIRECT, SHADOWED: ROUTE}.get(path)
        if unit == "ms (p99)" and path == DIRECT:
            continue
        others = series.get((profile, base or "", unit), [])
        if unit == "ms (p50)":
            compared = [value - other for value, other in zip(values, others, strict=False)]
        else:
            compared = [value / other for value, other in zip(values, others, strict=False)]
        rows.append(
            {
                "profile": profile,
                "path": path,
                "unit": unit,
                "median": round(statistics.median(values), 2),
                "min": round(min(values), 2),
                "max": round(max(values), 2),
                "compared": round(statistics.median(compared), 3) if compared else None,
                "with": base if compared else None,
            }
        )
    return rows


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Name the rows that miss their target."""
    judged = {(ROUTE, "ms (p50)"), (ROUTE, "images/s"), (SHADOWED, "ms (p99)")}
    return [
        f"{row['profile']}, {row['path']}, {row['unit']}: {row['compared']}"
        for row in rows
        if (row["path"], row["unit"]) in judged
        and (
            row["compared"] < TARGETS["images/s"]
            if row["unit"] == "images/s"
            else row["compared"] > TARGETS[row["unit"]]
        )
    ]


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row as text, for the table and the page alike."""
    sign = {"ms (p50)": "{:+g} ms", "images/s": "{:g} ×", "ms (p99)": "{:g} ×"}[row["unit"]]
    compared = "" if row["compared"] is None else sign.format(row["compared"])
    return [row["profile"], row["path"], row["unit"], str(row["median"]), compared, row["with"] or ""]


def markdown(rows: list[dict[str, Any]]) -> str:
    """Render the rows as the page's table; a test compares the two."""
    return record.markdown(HEADINGS, map(cells, rows))


def main() -> int:
    """Measure, print, record; exit status 1 if a target is missed."""
    parser = record.parser(__doc__, rounds=5, seconds=4.0)
    args = record.parsed(parser)
    if not wrk.is_installed():
        parser.error(wrk.MISSING)
    series: Series = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        photo = folder / "photo.jpg"
        photo.write_bytes(photos.jpeg(SIZE_WH))
        with _servers(copy_repository(folder / "repository"), folder) as ports:
            for _ in range(args.rounds):
                _measure_round(ports, photo, args.seconds, series)
            shed = {profile: round(_shed_share(each.metrics), 3) for profile, each in ports.items()}
        size = photo.stat().st_size
    rows = summarise(series)
    record.show(HEADINGS, zip(map(cells, rows), rows, strict=True))
    print(f"JPEG of {size:,} bytes; share of the shadow's requests that was shed: {shed}")
    result = {"concurrency": CONCURRENCY, "rounds": args.rounds, "jpeg_bytes": size, "shed": shed}
    args.record.write(result | {"rows": rows})
    for miss in missed(rows):
        print(f"target missed: {miss}", file=sys.stderr)
    return 1 if missed(rows) else 0


if __name__ == "__main__":
    record.end(main)
