"""Comparison of a variant's recent traffic with its reference; pure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from nereid.backends.routing.reference_file import CLASS, Reference, VariantReference
from nereid.insight.drift import recording
from nereid.insight.drift.recording import INPUT_SIGNALS, OUTPUT_SIGNALS, SIGNALS, SeriesCounts
from nereid.models.routes.location import RouteLocation, load_current_route, read_route_file
from nereid.repository.repository_index import pinned_models, readable_configs
from nereid.server.command_line import ENSEMBLE_PROFILE

# Minimum number of images in a window for a comparison.
MIN_REQUESTS = 200
# Probability that a comparison of one variant, of all its signals, exceeds a limit by chance.
RISK = 1e-4
MEASURES = ("psi", "js")
DriftStatus = Literal["ok", "drift", "too few", "no reference"]


class MonitoredVariant(Struct, frozen=True):
    """A variant of a served route, and the model whose images it gets, "" and 0 if that is not known."""

    route: str
    name: str
    model: str
    version: int
    network_version: str
    image_model: str = ""
    image_version: int = 0

    def series(self, signal: str) -> str:
        """Return the name of the series of a signal."""
        if signal in INPUT_SIGNALS:
            return recording.image_series(self.image_model, self.image_version, signal)
        return recording.route_series(self.route, self.name, self.network_version, signal)

    def requests(self, window: SeriesCounts) -> int:
        """Return the measured responses in a window."""
        return max(sum(window.get(self.series(signal), {}).values()) for signal in OUTPUT_SIGNALS)


class SignalDrift(Struct, frozen=True):
    """One signal: images in the window, distances from the reference and their limits by measure."""

    signal: str
    images: int
    verdict: DriftStatus
    score: dict[str, float] = {}
    limit: dict[str, float] = {}


class VariantDrift(Struct, frozen=True):
    """One variant in the window.

    Attributes:
        requests: classified images in the window.
        idle_s: seconds since the window last grew; None if it never did.
        reference_age_s: age of the reference; None without one.
        problem: why the variant is not compared; empty if it is.
    """

    variant: str
    model: str
    version: int
    requests: int
    idle_s: float | None
    reference_age_s: float | None
    problem: str = ""
    signals: tuple[SignalDrift, ...] = ()

    @property
    def has_drifted(self) -> bool:
        """Whether a signal exceeds its limit."""
        return any(signal.verdict == "drift" for signal in self.signals)


def why_not_compared(target: MonitoredVariant, reference: Reference | None) -> str:
    """Return why a variant cannot be compared; empty if it can."""
    if reference is None:
        return "the route has no reference"
    if (variant := reference.variant(target.name)) is None:
        return "the reference does not have this variant"
    if (variant.model, variant.version) != (target.model, target.version):
        compared = f"version {variant.version} of '{variant.model}'"
        return (
            f"the reference is of {compared}, the route serves version {target.version} of '{target.model}'"
        )
    return ""


def compare(target: MonitoredVariant, window: SeriesCounts, reference: Reference) -> tuple[SignalDrift, ...]:
    """Compare the window of a variant with its reference, signal by signal.

    Signals that the variant's task does not have are skipped.
    """
    variant_reference = reference.variant(target.name)
    assert variant_reference is not None
    reference_signals = {*variant_reference.signals, *([CLASS] if variant_reference.classes else [])}
    each_risk = RISK / (max(1, len(reference_signals)) * len(MEASURES))
    drifts = []
    for signal in SIGNALS:
        counts = window.get(target.series(signal), {})
        if counts or signal in reference_signals:
            drifts.append(_compare_signal(signal, counts, variant_reference, reference, each_risk))
    return tuple(drifts)


def _compare_signal(
    signal: str,
    counts: Mapping[str, int],
    variant_reference: VariantReference,
    reference: Reference,
    risk: float,
) -> SignalDrift:
    # Loads NumPy: 16 MB that only the server of a route with a reference needs.
    from nereid.insight.drift import scores

    images = sum(counts.values())
    if signal == CLASS:
        old: Sequence[int] = variant_reference.classes
        new: Sequence[int] = recording.class_counts(counts, reference.classes)
    else:
        histogram = variant_reference.signals.get(signal)
        same = histogram is not None and histogram.bounds == recording.BOUNDS[signal]
        old = histogram.counts if histogram and same else ()
        new = recording.histogram(counts, signal)
    if not sum(old):
        return SignalDrift(signal, images, "no reference")
    if images < MIN_REQUESTS:
        return SignalDrift(signal, images, "too few")
    groups = scores.group_buckets(old, is_ordered=signal != CLASS)
    old, new = scores.add_up(old, groups), scores.add_up(new, groups)
    distance = scores.distance(old, new)
    limit = scores.chance_limit(tuple(old), scores.rounded_down(images), risk)
    is_over = distance.psi > limit.psi or distance.js > limit.js
    verdict: DriftStatus = "drift" if is_over else "ok"
    return SignalDrift(signal, images, verdict, distance._asdict(), limit._asdict())


def targets_of(location: RouteLocation, profile: str) -> list[MonitoredVariant]:
    """Return the variants of a route, in a profile of the server.

    In a profile with `fused` models, the pinned model measures the images, else its preprocessing model.

    Raises:
        OperationFailed, InvalidConfig: the route file is missing or invalid.
        OSError: it cannot be read.
    """
    loaded = load_current_route(location, read_route_file(location))
    measured = _image_meters(location.repository, profile)
    return [
        MonitoredVariant(
            location.name,
            variant.name,
            variant.model,
            variant.version,
            loaded.network_versions[variant.name],
            image_model,
            image_version or variant.version,
        )
        for variant in loaded.route.variants
        for image_model, image_version in [measured.get(variant.model, ("", 0))]
    ]


def _image_meters(repository: Path, profile: str) -> dict[str, tuple[str, int]]:
    """Return the model and version that measure a pinned model's images; version 0 for its own."""
    plain = "" if profile == ENSEMBLE_PROFILE else profile
    documents = readable_configs(repository, plain)
    meters = {}
    for pin in pinned_models(repository, documents):
        is_fused = documents[pin.model].get("backend") == "fused"
        meters[pin.model] = (pin.model, 0) if is_fused else (pin.preprocess, pin.preprocess_version)
    return meters
