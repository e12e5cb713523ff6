"""The drift monitor against simulated traffic: false alarms, and the part of degraded traffic that it shows.

The signals are those of real photos and a real network, computed once in this process. Each reference is a
sample of the photos. Each window draws its requests from all photos, or from degraded copies of them, and is
compared as the monitor does.

    python -m loadtest.drift_simulation [--references 250] [--looks 40] [--record drift_simulation]
"""

import datetime
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image

from loadtest import record
from loadtest.drift_photos import DEGRADED, crops, jpeg
from nereid.assets import REPOSITORY
from nereid.config.model_config import ModelConfig
from nereid.contract import SCORES
from nereid.drift import series
from nereid.drift.baseline import Measured
from nereid.drift.comparison import RISK, Target, compare
from nereid.imaging.pipeline import Pipeline
from nereid.inference.session import Session
from nereid.processes import available_cores
from nereid.routing.reference_file import CLASS, TOP_CLASSES, Histogram, Reference, VariantReference
from nereid.tasks.classification_outputs import ClassificationOutputs

TARGET = Target("v1", "net", 1, "1", "net", 1)
ROUTE, WINDOW, PHOTOS, CHUNK = "classify", 10_000, 1200, 100
REFERENCE_SIZES = (300, 3000)
SHARES = (1.0, 0.2, 0.05)
# Looks at degraded traffic, for each reference.
DEGRADED_LOOKS = 2
SAME = "undisturbed"
HEADINGS = ("traffic", "degraded part", "images of the reference", "looks", "alarms", "rate", "signals")


@dataclass(frozen=True, slots=True)
class Population:
    """Photos to draw from: the bucket of each photo by signal, and its best class."""

    buckets: dict[str, np.ndarray]
    best: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[Measured]) -> "Population":
        """Return the photos of several measurements."""
        buckets = {
            name: np.searchsorted(bounds, [value for part in parts for value in part.values[name]])
            for name, bounds in series.BOUNDS.items()
        }
        return cls(buckets, np.array([index for part in parts for index in part.best]))

    def draw(self, rng: np.random.Generator, images: int) -> "Sample":
        """Draw photos with replacement, and return their histograms."""
        times = rng.multinomial(images, np.full(len(self.best), 1 / len(self.best)))
        counts = {
            name: np.bincount(places, times, len(series.BOUNDS[name]) + 1).astype(int)
            for name, places in self.buckets.items()
        }
        return Sample(images, counts, Counter(dict(enumerate(np.bincount(self.best, times).astype(int)))))


@dataclass(frozen=True, slots=True)
class Sample:
    """Histograms of drawn photos by signal, and the photos by best class."""

    images: int
    counts: dict[str, np.ndarray]
    best: Counter[int]

    def reference(self) -> Reference:
        """Return the sample as a reference."""
        classes = tuple(index for index, count in self.best.most_common(TOP_CLASSES) if count)
        named = [int(self.best[index]) for index in classes]
        signals = {
            name: Histogram(series.BOUNDS[name], tuple(map(int, counts)))
            for name, counts in self.counts.items()
            if counts.any()  # a classifier finds neither lines nor objects
        }
        mine = VariantReference(
            *("v1", "net", 1, "1", self.images, signals), (*named, self.images - sum(named))
        )
        return Reference(datetime.datetime.now(datetime.UTC), "simulation", (mine,), classes)

    def window(self, *others: "Sample") -> series.Growth:
        """Return this sample, with others added, as the growth of a metrics page."""
        found: series.Growth = {}
        for name, counts in self.counts.items():
            total = sum((other.counts[name] for other in others), counts)
            if not total.any():
                continue
            bounds = [*(f"{bound:g}" for bound in series.BOUNDS[name]), "+Inf"]
            is_input = name in series.INPUT_SIGNALS
            key = (
                series.image_series("net", 1, name)
                if is_input
                else series.route_series(ROUTE, "v1", "1", name)
            )
            found[key] = {bound: int(count) for bound, count in zip(bounds, total, strict=True) if count}
        best = sum((other.best for other in others), self.best)
        classes = {str(index): int(count) for index, count in best.items() if count}
        return found | {series.route_series(ROUTE, "v1", "1", CLASS): classes}


def measure(name: str, photos: Sequence[Image.Image]) -> Measured:
    """Return the signals of photos, or of their copies that are degraded as `name` says."""
    found = Measured()
    change = DEGRADED[name][0] if name in DEGRADED else None
    network = ModelConfig.from_file(REPOSITORY / "efficientnet_lite0", 1)
    preprocess = ModelConfig.from_file(REPOSITORY / "imagenet_preprocess", 1)
    pipeline = Pipeline.from_config(preprocess, 1, 1, found.add_inputs)
    session = Session.from_config(network)
    for photo in photos:
        batch = pipeline.run([[jpeg(change(photo) if change else photo)]])
        (scores,) = session.run({network.inputs[0].name: batch.tensor}, [network.outputs[0].name])
        signals = ClassificationOutputs().signals({SCORES: scores})
        assert signals
        found.add_outputs(signals)
    return found


def alarms(window: series.Growth, reference: Reference) -> frozenset[str]:
    """Return the signals over their limits."""
    found = compare(TARGET, ROUTE, window, reference)
    assert {each.images for each in found} == {WINDOW}
    return frozenset(each.signal for each in found if each.verdict == "drift")


@dataclass(frozen=True, slots=True)
class Traffic:
    """A kind of traffic: copies of which a part of the requests has."""

    name: str
    share: float = 0.0


TRAFFIC = (Traffic(SAME), *(Traffic(name, share) for name in DEGRADED for share in SHARES))


def looks(
    populations: dict[str, Population], size: int, undisturbed_looks: int, seed: int
) -> dict[Traffic, list[frozenset[str]]]:
    """Draw one reference of `size` images, and compare windows of every kind with it."""
    rng = np.random.default_rng([size, seed])
    reference = populations[SAME].draw(rng, size).reference()
    found: dict[Traffic, list[frozenset[str]]] = {}
    for traffic in TRAFFIC:
        degraded = round(WINDOW * traffic.share)
        found[traffic] = []
        for _ in range(DEGRADED_LOOKS if degraded else undisturbed_looks):
            more = [populations[traffic.name].draw(rng, degraded)] if degraded else []
            window = populations[SAME].draw(rng, WINDOW - degraded).window(*more)
            found[traffic].append(alarms(window, reference))
    return found


def summarise(size: int, traffic: Traffic, found: Sequence[frozenset[str]]) -> record.Row:
    """Return the row of one kind of traffic; the signals are those of at least half of the alarms."""
    over = [each for each in found if each]
    named = Counter(signal for each in over for signal in each)
    return {
        "traffic": traffic.name,
        "share": traffic.share,
        "size": size,
        "looks": len(found),
        "alarms": len(over),
        "signals": sorted(signal for signal, count in named.items() if 2 * count >= len(over)),
    }


def markdown(rows: Sequence[record.Row]) -> str:
    """Render the rows as the table of docs/drift.md."""
    return record.markdown(
        HEADINGS,
        (
            (
                row["traffic"],
                f"{row['share']:.0%}" if row["share"] else "none",
                f"{row['size']:,}",
                f"{row['looks']:,}",
                f"{row['alarms']:,}",
                f"{row['alarms'] / row['looks']:.2%}",
                ", ".join(row["signals"]) or "none",
            )
            for row in rows
        ),
    )


def populations_of(pool: ProcessPoolExecutor) -> dict[str, Population]:
    """Return the photos, and each kind of degraded copies."""
    photos = crops(PHOTOS)
    found = {}
    for name in (SAME, *DEGRADED):
        chunks = [photos[start : start + CHUNK] for start in range(0, len(photos), CHUNK)]
        found[name] = Population.of(list(pool.map(partial(measure, name), chunks)))
    return found


def main() -> int:
    """Simulate, print and record; exit status 1 if too many looks at undisturbed traffic raise an alarm."""
    args = record.parsed(record.parser(__doc__, references=250, looks=40, seed=1))
    rows, missed = [], []
    with ProcessPoolExecutor(available_cores()) as pool:
        populations = populations_of(pool)
        for size in REFERENCE_SIZES:
            one = partial(looks, populations, size, args.looks)
            found = list(pool.map(one, range(args.seed, args.seed + args.references), chunksize=10))
            for traffic in TRAFFIC:
                rows.append(summarise(size, traffic, [look for each in found for look in each[traffic]]))
                if not traffic.share and rows[-1]["alarms"] > RISK * rows[-1]["looks"]:
                    missed.append(f"{rows[-1]['alarms']} false alarms in {rows[-1]['looks']:,} looks")
    print(markdown(rows))
    return record.finish(args.record, {"rows": rows}, missed)


if __name__ == "__main__":
    record.end(main)
