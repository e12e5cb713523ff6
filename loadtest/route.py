"""The cost of a route: the same photos through the route and directly to its variant, in one run.

A third path is a route that mirrors all requests to the other variant. Under saturation a shadow is
shed, so it must not cost anything.

    python -m loadtest.route [--rounds 5] [--seconds 4]       needs `wrk` (Debian: apt-get install wrk)
"""

import contextlib
import json
import os
import shutil
import statistics
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from loadtest import record, servers, wrk
from nereid import assets, metrics_page
from nereid.contract import VARIANT_HEADER
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
TO_VARIANT = {VARIANT_HEADER: "v1"}
HEADINGS = ("profile", "path", "unit", "median", "compared", "with")
BASES = {ROUTE: DIRECT, SHADOWED: ROUTE}
P50, RATE, P99 = "ms (p50)", "images/s", "ms (p99)"
# Additional milliseconds at concurrency 1, share of the throughput, factor of p99 with a shadow of 100 %.
TARGETS = {(ROUTE, P50): 1.0, (ROUTE, RATE): 0.90, (SHADOWED, P99): 1.10}

Series = dict[tuple[str, str, str], list[float]]


def copy_repository(target: Path) -> Path:
    """Copy the model repository, with another route that mirrors every request."""
    shutil.copytree(assets.REPOSITORY, target)
    shutil.copytree(target / "classify", target / "shadowed")
    config = target / "shadowed" / "config.pbtxt"
    config.write_text(config.read_text().replace('"classify', '"shadowed'))
    route = json.loads((target / "classify.route.json").read_text())
    route["shadows"] = [{"name": "all", "model": SHADOW, "version": 1, "percent": 100}]
    (target / "shadowed.route.json").write_text(json.dumps(route))
    return target


def _measure_round(ports: dict[str, Ports], photo: Path, seconds: float, series: Series) -> None:
    for profile, each in ports.items():
        for path, model in MODELS.items():
            # A single caller before each saturating load: it drains the queues of the load before.
            alone = wrk.post(each.http, infer_path(model), photo, 1, seconds, TO_VARIANT)
            series[profile, path, P50].append(alone.p50_ms)
            load = wrk.post(each.http, infer_path(model), photo, CONCURRENCY, seconds, TO_VARIANT)
            series[profile, path, RATE].append(load.rate)
            series[profile, path, P99].append(load.p99_ms)


def shed_share(metrics_port: int) -> float:
    """Return the share of requests that were not mirrored because others were queued.

    Raises:
        SystemExit: the server counted no request for a shadow, so the result is invalid.
    """
    counts: Counter[str] = Counter()
    for sample in metrics_page.parse(metrics_page.fetch(f"127.0.0.1:{metrics_port}", timeout_s=10)):
        if sample.name == "nereid_route_shadow_requests_total":
            counts[sample.labels["outcome"]] += int(sample.value)
    if not counts.total():
        raise SystemExit("the shadow was not measured: expected requests for it, the server counts none")
    return counts["shed"] / counts.total()


def summarise(series: Series) -> list[record.Row]:
    """Return a row per profile, path and unit: the median, and the median of the rounds' comparisons."""
    rows: list[record.Row] = []
    for (profile, path, unit), values in series.items():
        if unit == P99 and path == DIRECT:
            continue
        compared, base = None, BASES.get(path)
        if base:
            others = series[profile, base, unit]
            if unit == P50:
                compared = round(statistics.median(map(float.__sub__, values, others)), 3)
            else:
                compared = record.median_ratio(values, others)
        about = {"profile": profile, "path": path, "unit": unit}
        rows.append(about | record.spread(values, 2) | {"compared": compared, "with": base})
    return rows


def missed(rows: list[record.Row]) -> list[str]:
    """Return the rows that miss their target."""
    found = []
    for row in rows:
        target = TARGETS.get((row["path"], row["unit"]))
        if target is not None and (row["compared"] - target) * (-1 if row["unit"] == RATE else 1) > 0:
            found.append(f"{row['profile']}, {row['path']}, {row['unit']}: {row['compared']}")
    return found


def _cells(row: record.Row) -> list[object]:
    sign = "{:+g} ms" if row["unit"] == P50 else "{:g} ×"
    compared = "" if row["compared"] is None else sign.format(row["compared"])
    return [row["profile"], row["path"], row["unit"], row["median"], compared, row["with"] or ""]


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as the table of docs/routing.md."""
    return record.markdown(HEADINGS, map(_cells, rows))


def main() -> int:
    """Measure, print and record; exit status 1 if a target is missed."""
    args = record.parsed(record.parser(__doc__, rounds=5, seconds=4.0), wrk.missing())
    series: Series = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        photo = folder / "photo.jpg"
        photo.write_bytes(photos.jpeg(SIZE_WH))
        repository = copy_repository(folder / "repository")
        ports = {
            profile: stack.enter_context(
                servers.served(folder, os.environ, profile, repository)
            ).options.ports
            for profile in PROFILES
        }
        for _ in range(args.rounds):
            _measure_round(ports, photo, args.seconds, series)
        shed = {profile: round(shed_share(each.metrics), 3) for profile, each in ports.items()}
        size = photo.stat().st_size
    rows = summarise(series)
    print(markdown(rows))
    print(f"JPEG of {size:,} bytes; share of the shadow's requests that was shed: {shed}")
    result = {"concurrency": CONCURRENCY, "rounds": args.rounds, "jpeg_bytes": size, "shed": shed}
    return record.finish(args.record, result | {"rows": rows}, missed(rows))


if __name__ == "__main__":
    record.end(main)
