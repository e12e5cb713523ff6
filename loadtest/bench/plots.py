"""The plot of a record as SVG; equal records give equal bytes."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from loadtest.bench import summary
from loadtest.bench.plan import IN_PROCESS, PATHS, PHOTOS

matplotlib.use("svg")

Row = dict[str, Any]

COLOURS = {
    **{"cpu": "#0969da", "ensemble": "#8250df", "by-hand": "#57606a"},
    **{"route": "#1a7f37", "gateway": "#9a6700"},
}
LIMIT = "#cf222e"
# A fixed salt makes the ids stable; text stays text.
STYLE: Any = {"svg.hashsalt": "nereid", "svg.fonttype": "none", "font.size": 9.0, "axes.titlesize": 9.0}
# On a dark page: light text on a dark background, with the same hues.
DARK = "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.9) hue-rotate(180deg) } }</style>"


def throughput(rows: Sequence[Row]) -> str:
    """Draw images/s of each path at its best concurrency, FP32 over HTTP, and the limit, by photo."""
    shown = [photo for photo in PHOTOS if _best(rows, photo)]
    sizes = [len(_best(rows, photo)) for photo in shown]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 0.9 + 0.35 * (sum(sizes) + len(sizes))), layout="constrained")
        all_axes = figure.subplots(len(shown), sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
        for axes, photo in zip(all_axes, shown, strict=True):
            best, limit = _best(rows, photo), _limit(rows, photo)["rate"]["median"]
            names = [f"{row['path']}, {row['concurrency']} in flight" for row in best]
            rates = [row["rate"] for row in best]
            medians = [rate["median"] for rate in rates]
            ranges = [
                [rate["median"] - rate["min"] for rate in rates],
                [rate["max"] - rate["median"] for rate in rates],
            ]
            axes.barh(names, medians, xerr=ranges, color=[COLOURS[row["path"]] for row in best])
            for place, row in enumerate(best):
                text = f"{row['rate']['median']:.0f} ({row['of_limit']['median']:.2f})"
                axes.text(1.01 * max(row["rate"]["max"], limit), place, text, va="center")
            axes.axvline(limit, color=LIMIT, linestyle="--")
            axes.set_title(f"photo {PHOTOS[photo]}", loc="left", fontweight="bold")
            axes.set_title(f"in process: {limit:.0f}", loc="right", color=LIMIT)
            axes.invert_yaxis()
            axes.margins(x=0.25)
        all_axes[-1].set_xlabel("images/s")
        return as_svg(figure, "Throughput at the best concurrency: median and range; share of the limit")


def _best(rows: Sequence[Row], photo: str) -> list[Row]:
    mine = [row for row in summary.plain(rows) if row["photo"] == photo]
    paths = [path for path in PATHS if any(row["path"] == path for row in mine)]
    return [summary.best([row for row in mine if row["path"] == path]) for path in paths]


def _limit(rows: Sequence[Row], photo: str) -> Row:
    wanted = (IN_PROCESS, photo)
    return next(row for row in summary.plain(rows) if (row["path"], row["photo"]) == wanted)


def as_svg(figure: Figure, title: str) -> str:
    """Return a figure as SVG with a title; equal figures give equal bytes."""
    figure.suptitle(title, fontsize=10)
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Type": None})
    _, mark, rest = target.getvalue().partition("<svg ")
    tag, end, body = rest.partition(">")
    text = f'{mark}{tag} role="img"{end}\n <title>{title}</title>\n {DARK}{body}'
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
