"""The plot of docs/rollouts.md: traffic and rates of recorded rollouts over time.

python -m loadtest.rollout_plot         writes docs/rollouts.svg from the record; `make docs` runs it
"""

import argparse
import json

import matplotlib
from matplotlib.figure import Figure

from loadtest import record
from loadtest.bench.plots import LIMIT, STYLE, Row, as_svg

TARGET = record.FOLDER.parent / "docs" / "rollouts.svg"
# More points would not be visible.
MAX_LOOKS = 40
COLOURS = {"error": LIMIT, "slow": "#9a6700", "disagreement": "#8250df"}


def draw(timelines: dict[str, list[Row]]) -> str:
    """Draw one panel for each candidate: its traffic in steps, its rates as lines, the control's as dots."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 1.5 * len(timelines)), layout="constrained")
        panels = figure.subplots(len(timelines), sharex=True, squeeze=False)[:, 0]
        for axes, (name, looks) in zip(panels, timelines.items(), strict=True):
            looks = [*looks[:: max(1, len(looks) // MAX_LOOKS)], looks[-1]]
            seconds = [look["s"] for look in looks]
            traffic = [look["percent"] for look in looks]
            axes.fill_between(seconds, traffic, step="post", color="#0969da", alpha=0.2, label="traffic")
            for event, colour in COLOURS.items():
                seen = [(look["s"], *look["events"][event]) for look in looks if event in look["events"]]
                if seen:
                    x, ours, theirs = zip(*seen, strict=True)
                    axes.plot(x, [100 * rate for rate in ours], color=colour, label=event)
                    axes.plot(x, [100 * rate for rate in theirs], ":", color=colour)
            axes.set(ylim=(0, 105), ylabel="%")
            axes.set_title(name, loc="left", fontweight="bold")
            axes.grid(True, alpha=0.4)
        panels[0].legend(loc="upper right", ncols=4)
        panels[-1].set(xlabel="seconds since the start", xlim=(0, None))
        return as_svg(figure, "Rollouts: traffic and rates of the candidate; rates of the control dotted")


def main() -> None:
    """Write the plot."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    recorded = json.loads((record.RESULTS / "rollouts.json").read_text())
    TARGET.write_text(draw(recorded["timelines"]))


if __name__ == "__main__":
    main()
