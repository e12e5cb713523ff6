"""Series of a metrics page, their history, and the comparison with a reference."""

import datetime
import json
from itertools import pairwise, product
from math import inf

import msgspec
import numpy as np
import pytest
from jsonschema import Draft202012Validator

from nereid.backends.routing import reference_file
from nereid.base.errors import InvalidConfig, OperationFailed
from nereid.base.prometheus_text import MetricSamples
from nereid.base.task_outputs import QualitySignals
from nereid.insight.drift import baseline, recording, scores
from nereid.insight.drift.baseline import VariantSignals, from_traffic
from nereid.insight.drift.comparison import MonitoredVariant, VariantDrift, compare, why_not_compared
from nereid.insight.drift.drift_report import agreement, wilson
from nereid.insight.drift.monitor import DriftState, RouteDrift, metrics
from nereid.insight.drift.recording import History, RecordedInterval, series_counts
from tests.tables import cases

TARGET = MonitoredVariant("r", "v1", "net_v1", 1, "7", "net_v1", 1)
NOW = 1_000_000.0
PAGE = """
nereid_route_confidence_bucket{le="0.1",model_instance="r_0_0",route="r",variant="v1",version="7"} 1
nereid_route_confidence_bucket{le="0.5",model_instance="r_0_0",route="r",variant="v1",version="7"} 3
nereid_route_confidence_bucket{le="+Inf",model_instance="r_0_0",route="r",variant="v1",version="7"} 10
nereid_route_confidence_bucket{le="+Inf",model_instance="r_0_1",route="r",variant="v1",version="7"} 5
nereid_route_confidence_count{model_instance="r_0_0",route="r",variant="v1",version="7"} 10
nereid_route_predicted_total{class="3",model_instance="r_0_0",route="r",variant="v1",version="7"} 8
nereid_route_predicted_total{class="other",model_instance="r_0_0",route="r",variant="v1",version="7"} 2
nereid_route_shadow_requests_total{model_instance="r_0_0",route="r",shadow="s",outcome="agreed"} 4
nereid_route_requests_total{model_instance="r_0_0",outcome="ok",reason="weight",route="r"} 10
nereid_image_aspect_bucket{le="0.4",model="net_v1",version="1"} 0
nereid_image_aspect_bucket{le="+Inf",model="net_v1",version="1"} 6
nereid_image_aspect_sum{model="net_v1",version="1"} 6.5
nv_inference_count{model="r",version="1"} 10
"""


def drawn(seed: int, images: int = 400, brightness: float = 0.5) -> VariantSignals:
    rng = np.random.default_rng(seed)
    values = {name: rng.beta(4, 4, images).tolist() for name in recording.BOUNDS}
    values["brightness"] = np.clip(rng.normal(brightness, 0.1, images), 0, 1).tolist()
    signals = VariantSignals(TARGET)
    best = rng.integers(0, 5, images).tolist()
    signals.add_outputs(
        QualitySignals(best=best, **{name: values[name] for name in recording.OUTPUT_SIGNALS})
    )
    signals.images = images
    for number in range(images):
        signals.add_inputs({name: values[name][number] for name in recording.INPUT_SIGNALS})
    return signals


def reference_of(measured: VariantSignals) -> reference_file.Reference:
    classes = (0, 1, 2)
    created = datetime.datetime.fromtimestamp(NOW - 60, datetime.UTC)
    mine = baseline.reference_of(TARGET, measured.window, measured.images, classes)
    return reference_file.Reference(created, "photos", (mine,), classes)


def history_of(length_s: float, slots: dict[float, recording.SeriesCounts]) -> History:
    """Return a history of slots of one length, by their ages in seconds."""
    history = History()
    history.slots.extend(RecordedInterval(NOW - age_s, length_s, counts) for age_s, counts in slots.items())
    return history


def test_page_is_read_by_series():
    page = MetricSamples.parse(PAGE, recording.PREFIXES)

    assert series_counts(page) == {
        "route|r|v1|7|confidence": {"0.1": 1, "0.5": 2, "+Inf": 12},
        "route|r|v1|7|class": {"3": 8, "other": 2},
        "shadow|r|s": {"agreed": 4},
        "image|net_v1|1|aspect": {"+Inf": 6},
    }
    assert series_counts(page - page) == {}


def test_bucket_that_lags_behind_counts_once():
    line, series = 'nereid_image_aspect_bucket{{le="{}",model="m",version="1"}} {}\n', "image|m|1|aspect"
    pages = [
        MetricSamples.parse("".join(map(line.format, ("0.4", "0.5", "+Inf"), counts)))
        for counts in ((0, 0, 0), (5, 4, 5), (5, 5, 5))
    ]
    first, second = (series_counts(after - before) for before, after in pairwise(pages))
    history = history_of(1.0, {1: first, 0: second})

    window, _ = history.window(NOW, 3600)

    assert sum(recording.histogram(window[series], "aspect")) == sum(window[series].values()) == 5
    assert history.last_increase(series) == NOW - 1


def test_value_on_a_bound_belongs_to_the_bucket_below_it():
    measured = VariantSignals(TARGET)

    measured.add_outputs(QualitySignals(found=[0, 1, 5, 999]))

    assert measured.window == {"route|r|v1|7|found": {"0": 1, "1": 1, "6": 1, "+Inf": 1}}


def test_history_is_bounded():
    history = History(max_slots=10)
    for number in range(1000):
        history.slots.append(RecordedInterval(NOW + number, 1.0, {"route|r|v1|7|confidence": {"0.5": 1}}))
    line = 'nereid_image_aspect_bucket{{le="+Inf",model="m{}",version="1"}} 1\n'

    page = series_counts(MetricSamples.parse("".join(line.format(number) for number in range(5000))))

    window, covered_s = history.window(NOW + 999, 3600)
    assert (len(history.slots), window["route|r|v1|7|confidence"], covered_s) == (10, {"0.5": 10}, 10.0)
    assert len(page) == recording.MAX_SERIES


def test_window_has_only_recent_slots(tmp_path):
    history = history_of(
        60.0, {age_s: {"route|r|v1|7|entropy": {"0.1": age_s}} for age_s in (7200, 3000, 10)}
    )
    history.store(tmp_path)

    copy = History.load(tmp_path)

    assert copy.slots == history.slots
    assert copy.window(NOW, 3600) == ({"route|r|v1|7|entropy": {"0.1": 3010}}, 120.0)
    assert copy.last_increase("route|r|v1|7|") == NOW - 10
    assert copy.last_increase("route|r|v2|") is None
    assert list(History.load(tmp_path / "missing").slots) == []


def test_classes_count_only_with_their_reference():
    """Before a reference, the route counted other classes: they would look like drift."""
    classes, entropy = "route|r|v1|7|class", "route|r|v1|7|entropy"
    history = history_of(10.0, {age: {classes: {"0": 1}, entropy: {"0.1": 1}} for age in (300, 40, 10)})

    assert history.window(NOW, 3600, NOW - 60) == ({classes: {"0": 2}, entropy: {"0.1": 3}}, 30)
    assert history.window(NOW, 3600, NOW - 52) == ({classes: {"0": 1}, entropy: {"0.1": 3}}, 30)
    assert history.window(NOW, 3600, NOW) == ({entropy: {"0.1": 3}}, 30)


def verdicts(window: recording.SeriesCounts, reference: reference_file.Reference) -> dict[str, str]:
    return {drift.signal: drift.verdict for drift in compare(TARGET, window, reference)}


def test_only_the_changed_signal_drifts():
    results = verdicts(drawn(2, brightness=0.35).window, reference_of(drawn(1)))

    assert {signal for signal, verdict in results.items() if verdict == "drift"} == {"brightness"}


@pytest.mark.parametrize("measure", ["psi", "js"])
def test_either_measure_shows_drift(monkeypatch, measure):
    limits = {"psi": inf, "js": inf, measure: 0.0}
    monkeypatch.setattr(scores, "chance_limit", lambda *arguments: scores.Distance(**limits))

    assert verdicts(drawn(2, brightness=0.9).window, reference_of(drawn(1)))["brightness"] == "drift"


def test_few_images_are_not_compared():
    reference = reference_of(drawn(1))
    (mine,) = reference.variants
    less = msgspec.structs.replace(mine, signals={"aspect": mine.signals["aspect"]}, classes=())

    assert set(verdicts(drawn(2, 150).window, reference).values()) == {"too few"}
    expected = dict.fromkeys(recording.SIGNALS, "no reference") | {"aspect": "ok"}
    assert verdicts(drawn(2).window, msgspec.structs.replace(reference, variants=(less,))) == expected


WRITTEN = reference_file.format_reference(reference_of(drawn(1)))
OTHER = "the reference is of version 1 of 'net_v1', the route serves version "


@cases(
    same=(TARGET, ""),
    new_variant=(MonitoredVariant("r", "v2", "net_v1", 1, "7"), "the reference does not have this variant"),
    new_version=(MonitoredVariant("r", "v1", "net_v1", 2, "8"), OTHER + "2"),
    other_model=(MonitoredVariant("r", "v1", "other", 1, "7"), OTHER + "1"),
)
def test_reference_of_another_model_is_not_used(target, reason):
    problem = why_not_compared(target, reference_of(drawn(1)))

    assert problem.startswith(reason)
    assert bool(problem) is bool(reason)
    assert why_not_compared(target, None) == "the route has no reference"


def test_reference_survives_its_file(root, tmp_path):
    schema = json.loads((root / "docs" / "reference.schema.json").read_text())
    (path := tmp_path / "r.reference.json").write_bytes(WRITTEN)

    assert reference_file.read_reference(path) == reference_of(drawn(1))
    Draft202012Validator(schema).validate(json.loads(WRITTEN))


@cases(
    "text",
    empty=b"",
    not_UTF_8=b"\xff",
    no_time_zone=b'{"created": "2026-11-25T00:00:00", "source": "x", "variants": []}',
    misspelt=WRITTEN.replace(b'"bounds"', b'"bonds"', 1),
    other_classes=WRITTEN.replace(b'"classes": [\n  0,', b'"classes": ['),
)
def test_wrong_reference_is_rejected(text, tmp_path):
    (path := tmp_path / "r.reference.json").write_bytes(text)

    with pytest.raises(InvalidConfig, match="nereid drift baseline"):
        reference_file.read_reference(path)


def test_reference_is_read_again_when_it_changes(tmp_path):
    watch = reference_file.ReferenceWatch(path := reference_file.path_of(tmp_path, "r"))
    seen = [watch.poll()]
    path.write_bytes(WRITTEN)
    seen += [watch.poll(), watch.poll()]
    classes = watch.classes
    path.write_text("{")
    seen.append(watch.poll())

    assert (seen, classes) == ([False, True, False, True], frozenset({0, 1, 2}))
    assert (watch.reference, watch.classes) == (None, None)
    assert "nereid drift baseline" in watch.problem


def recorded(seconds: float, measured: VariantSignals) -> History:
    """Return a history of the last `seconds` in ten slots, of which the newest has all images."""
    empty = {age * seconds / 10: {} for age in range(9, 0, -1)}
    return history_of(seconds / 10, empty | {0: measured.window})


def test_traffic_becomes_the_reference():
    """The classes are those of the reference before; a variant without traffic is left out."""
    targets, lines = [TARGET, MonitoredVariant("r", "v2", "net_v2", 1, "8", "net_v2", 1)], []
    created = datetime.datetime.fromtimestamp(NOW - 7200, datetime.UTC)
    old = msgspec.structs.replace(reference_of(drawn(2)), created=created)

    made = from_traffic(recorded(3600, drawn(1)), targets, 3600, NOW, old, lines.append)

    assert [*made.variants] == [*reference_of(drawn(1)).variants]
    assert lines == ["variant 'v2' is left out: 0 images in 1 h 0 min"]


def test_too_little_traffic_is_an_error():
    with pytest.raises(OperationFailed, match="expected 1 h 0 min of recorded traffic, got 10 min"):
        from_traffic(recorded(600, drawn(1)), [TARGET], 3600, NOW, None, print)
    with pytest.raises(OperationFailed, match="expected at least 100 images"):
        from_traffic(recorded(3600, drawn(1, 20)), [TARGET], 3600, NOW, None, print)


def test_gauges_have_every_signal():
    signals = compare(TARGET, drawn(2).window, reference_of(drawn(1)))
    variant = VariantDrift("v1", "net_v1", 1, 400, 12.0, 60.0, "", signals)
    not_compared = VariantDrift("v2", "net_v2", 1, 0, None, None, "no reference")

    page = metrics(DriftState(NOW, 3600, 3600, (RouteDrift("r", "photos", (variant, not_compared)),)))

    of_variant = 'route="r",variant="v1"'
    for signal, measure, kind in product(recording.SIGNALS, ("psi", "js"), ("score", "limit")):
        assert f'nereid_drift_{kind}{{{of_variant},signal="{signal}",measure="{measure}"}} ' in page
    numbers = {"window_requests": 400, "reference_age_seconds": 60, "last_request_seconds": 12}
    for name, number in numbers.items():
        assert f"nereid_drift_{name}{{{of_variant}}} {number}\n" in page
    assert "v2" not in page
    assert metrics(None) == metrics(DriftState(NOW, 1, 1, (RouteDrift("r", "", (not_compared,)),))) == ""


def test_shadows_agree_over_time():
    agreed = {4000: 5, 100: 8, 50: 1}
    history = history_of(
        60, {age_s: {"shadow|r|s": {"agreed": agreed[age_s], "disagreed": 1, "shed": 9}} for age_s in agreed}
    )

    periods = [msgspec.structs.astuple(period) for period in agreement(history, "r", NOW)]
    assert periods == [("s", 0.0, 11, 9), ("s", 3600.0, 6, 5)]


def test_interval_is_that_of_wilson():
    # Source of the numbers: Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)
