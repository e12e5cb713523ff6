"""Two plots of a record as SVG, in the colours that a reader's light or dark page wants."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from xml.sax.saxutils import escape

from loadtest.bench import summary
from loadtest.bench.plan import IN_PROCESS, PATHS, PHOTOS

Row = dict[str, Any]
Scale = Callable[[float], float]

WIDTH, BAR, LABELS, MARGIN = 760, 22, 130, 20
PANEL_W, PANEL_H, GAP, LINE = 235, 230, 130, 13
STYLE = """<style>
text { font: 12px sans-serif; fill: #24292f } .title { font-weight: bold } .small { font-size: 11px }
.axis { stroke: #57606a } .grid { stroke: #d0d7de } .limit { stroke: #cf222e; stroke-dasharray: 5 3 }
.cpu { --c: #0969da } .ensemble { --c: #8250df } .route { --c: #1a7f37 } .gateway { --c: #9a6700 }
.bar { fill: var(--c) } .whisker { stroke: #24292f } .line { stroke: var(--c); fill: none; stroke-width: 2 }
.dot, .name { fill: var(--c) } .p99 { stroke-dasharray: 6 3 } .limit-name { fill: #cf222e }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .axis { stroke: #8d96a0 } .grid { stroke: #30363d } .whisker { stroke: #e6edf3 }
.cpu { --c: #4493f8 } .ensemble { --c: #ab7df8 } .route { --c: #3fb950 } .gateway { --c: #d29922 }
.limit { stroke: #ff7b72 } .limit-name { fill: #ff7b72 } }
</style>"""


def linear(domain: tuple[float, float], target: tuple[float, float]) -> Scale:
    """Return where a value of `domain` lies in `target`, in pixels."""
    (low, high), (start, end) = domain, target
    return lambda value: start + (value - low) / (high - low) * (end - start)


def logarithmic(domain: tuple[float, float], target: tuple[float, float]) -> Scale:
    """Return the same, with equal ratios equally far apart."""
    place = linear((math.log(domain[0]), math.log(domain[1])), target)
    return lambda value: place(math.log(value))


def ticks(high: float, about: int = 5) -> list[float]:
    """Return round numbers from 0 up to `high`, at steps of 1, 2 or 5 times a power of ten."""
    rough = high / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [number * step for number in range(int(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten, from the last at or below `low` to the first from `high`."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max(tick for tick in found if tick <= low)
    last = min(tick for tick in found if tick >= high)
    return [tick for tick in found if first <= tick <= last]


def throughput(rows: Sequence[Row]) -> str:
    """Draw images/s of every path at its best concurrency, FP32 over HTTP, and the limit, photo by photo."""
    groups = {photo: _best(rows, photo) for photo in PHOTOS}
    groups = {photo: best for photo, best in groups.items() if best}
    shown = [row for photo, best in groups.items() for row in (*best, _limit(rows, photo))]
    high = max(row["rate"]["max"] for row in shown)
    scale = linear((0, high), (LABELS, WIDTH - 150))
    parts: list[str] = []
    y = 3.0 * MARGIN
    for photo, best in groups.items():
        parts += _bars(photo, best, _limit(rows, photo), scale, y)
        y += BAR * (len(best) + 2)
    grid = [
        f'<line class="grid" x1="{scale(tick):.1f}" x2="{scale(tick):.1f}" y1="{2 * MARGIN}" y2="{y:.0f}"/>'
        f'<text class="small" x="{scale(tick):.1f}" y="{y + 14:.0f}" text-anchor="middle">{tick:g}</text>'
        for tick in ticks(high)
    ]
    axis = f'<text x="{scale(high / 2):.0f}" y="{y + 32:.0f}" text-anchor="middle">images/s</text>'
    title = "Throughput at the best concurrency: median, least and most of the rounds; share of the limit"
    return _svg(y + 42, title, [*grid, *parts, axis])


def _bars(photo: str, best: Sequence[Row], limit: Row, scale: Scale, y: float) -> Iterable[str]:
    yield f'<text class="title" x="{MARGIN}" y="{y:.0f}">photo {PHOTOS[photo]}</text>'
    at = scale(limit["rate"]["median"])
    bottom = y + BAR * (len(best) + 0.6)
    yield f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 8:.0f}" y2="{bottom:.0f}"/>'
    name = f"in process: {limit['rate']['median']:.0f}"
    yield f'<text class="small limit-name" x="{at + 4:.0f}" y="{y:.0f}">{name}</text>'
    for number, row in enumerate(best):
        top = y + BAR * (number + 0.5)
        rate, middle = row["rate"], top + 0.4 * BAR
        low, median, high = (scale(rate[name]) for name in ("min", "median", "max"))
        label = escape(f"{row['path']}, {row['concurrency']} at once")
        yield f'<text x="{MARGIN}" y="{middle + 4:.0f}" class="small">{label}</text>'
        yield f'<g class="{row["path"]}"><rect class="bar" x="{LABELS}" y="{top:.0f}"'
        yield f'width="{median - LABELS:.1f}" height="{0.8 * BAR:.0f}"/></g>'
        yield f'<line class="whisker" x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
        told = f"{rate['median']:.0f} ({row['of_limit']['median']:.2f})"
        yield f'<text x="{max(high, at) + 6:.0f}" y="{middle + 4:.0f}" class="small">{told}</text>'


def latency(rows: Sequence[Row]) -> str:
    """Draw p50 and p99 of `cpu` and `ensemble` by concurrency, FP32 over HTTP, both axes logarithmic."""
    shown = [row for row in summary.plain(rows) if row["path"] in ("cpu", "ensemble")]
    values = [row[name]["median"] for row in shown for name in ("p50_ms", "p99_ms")]
    counts = sorted({row["concurrency"] for row in shown})
    levels = log_ticks(min(values), max(values))
    y = logarithmic((levels[0], levels[-1]), (3.0 * MARGIN + PANEL_H, 3.0 * MARGIN))
    parts: list[str] = []
    for number, photo in enumerate(PHOTOS):
        left = 60 + number * (PANEL_W + GAP)
        x = logarithmic((counts[0], max(counts[-1], counts[0] * 2)), (left, left + PANEL_W))
        parts += _frame(photo, left, x, y, counts, levels)
        parts += _even(rows, photo, counts, levels, x, y)
        mine = [row for row in shown if row["photo"] == photo]
        parts += _lines(sorted(mine, key=lambda row: int(row["concurrency"])), x, y)
    height = 3 * MARGIN + PANEL_H
    parts.append(f'<text x="{MARGIN}" y="{2 * MARGIN + 8}" class="small">ms</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{height + 36}" text-anchor="middle">requests in flight</text>')
    return _svg(height + 46, "Latency by concurrency: p50 solid, p99 dashed; medians of the rounds", parts)


def _frame(
    photo: str, left: float, x: Scale, y: Scale, counts: Sequence[int], levels: Sequence[float]
) -> Iterable[str]:
    yield f'<text class="title" x="{left}" y="{2 * MARGIN + 8}">photo {PHOTOS[photo]}</text>'
    across = f'x1="{left}" x2="{left + PANEL_W}"'
    for level in levels:
        yield f'<line class="grid" {across} y1="{y(level):.1f}" y2="{y(level):.1f}"/>'
        yield f'<text class="small" x="{left - 6}" y="{y(level) + 4:.0f}" text-anchor="end">{level:g}</text>'
    bottom = y(levels[0])
    yield f'<line class="axis" {across} y1="{bottom:.1f}" y2="{bottom:.1f}"/>'
    for count in counts:
        where = f'x="{x(count):.1f}" y="{bottom + 16:.0f}" text-anchor="middle"'
        yield f'<text class="small" {where}>{count}</text>'


def _even(
    rows: Sequence[Row], photo: str, counts: Sequence[int], levels: Sequence[float], x: Scale, y: Scale
) -> Iterable[str]:
    """Draw what every request would take at the limit's throughput, from where all cores are busy."""
    limit = _limit(rows, photo)
    places = [(count, count / limit["rate"]["median"] * 1e3) for count in counts if count > 1]
    places = [(count, ms) for count, ms in places if levels[0] <= ms <= levels[-1]]
    if places:
        points = " ".join(f"{x(count):.1f},{y(ms):.1f}" for count, ms in places)
        yield f'<polyline class="limit" fill="none" points="{points}"/>'
        count, ms = places[0]
        where = f'x="{x(count):.0f}" y="{y(ms) + LINE:.0f}"'
        yield f'<text class="small limit-name" {where}>in flight / limit</text>'


def _lines(rows: Sequence[Row], x: Scale, y: Scale) -> Iterable[str]:
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        for name, kind in (("p50_ms", "p50"), ("p99_ms", "p99")):
            place = x(row["concurrency"]), y(row[name]["median"])
            lines.setdefault((row["path"], kind), []).append(place)
    names = apart({line: places[-1][1] for line, places in lines.items()})
    for (path, kind), places in lines.items():
        points = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        dots = "".join(f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in places)
        where = f'x="{places[-1][0] + 8:.0f}" y="{names[path, kind] + 4:.0f}"'
        name = f'<text class="small name" {where}>{path} {kind}</text>'
        yield f'<g class="{path}"><polyline class="line {kind}" points="{points}"/>{dots}{name}</g>'


def apart(tops: dict[Any, float]) -> dict[Any, float]:
    """Move names that would stand on each other down, until each has a line of its own."""
    found: dict[Any, float] = {}
    lowest = -math.inf
    for name, top in sorted(tops.items(), key=lambda item: item[1]):
        found[name] = lowest = max(top, lowest + LINE)
    return found


def _best(rows: Sequence[Row], photo: str) -> list[Row]:
    mine = [row for row in summary.plain(rows) if row["photo"] == photo]
    paths = [path for path in PATHS if any(row["path"] == path for row in mine)]
    return [summary.best([row for row in mine if row["path"] == path]) for path in paths]


def _limit(rows: Sequence[Row], photo: str) -> Row:
    wanted = (IN_PROCESS, photo)
    return next(row for row in summary.plain(rows) if (row["path"], row["photo"]) == wanted)


def _svg(height: float, title: str, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
    heading = f'<text class="title" x="{MARGIN}" y="{MARGIN}">{escape(title)}</text>'
    return "\n".join([head, f"<title>{escape(title)}</title>", STYLE, heading, *parts, "</svg>", ""])
