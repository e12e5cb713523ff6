"""The committed rules in scaled time: durations are divided by 60, thresholds stay."""

import pytest

from loadtest import time_scale
from tests.tables import cases


@cases(
    ("text", "scaled"),
    {
        "range": ("rate(a[15m]) > 0.05", "rate(a[15s]) > 0.05"),
        "short range": ("rate(a[1m])", "rate(a[8s])"),
        "day": ("sum_over_time(a[1d]) / 0.001", "sum_over_time(a[1440s]) / 0.001"),
        "offset": ("a offset 6h > 50e6", "a offset 360s > 50e6"),
        "interval of the sums": ("60 * sum_over_time(a[1h]) >= 10", "1 * sum_over_time(a[60s]) >= 10"),
        "seconds of a day": ("deriv(a[6h]) * 86400", "deriv(a[360s]) * 1440"),
        "number of requests": ("clamp_min(a, 60)", "clamp_min(a, 60)"),
    },
)
def test_durations_are_divided(text, scaled):
    assert time_scale.expression(text) == scaled


@pytest.mark.parametrize("duration", ["", "5", "1h30m", "5w"])
def test_other_durations_are_refused(duration):
    """A duration that would stay unscaled is an error."""
    with pytest.raises(ValueError, match="expected a duration such as 5m, got"):
        time_scale.seconds(duration)
