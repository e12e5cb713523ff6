"""Readable numbers with units."""

import pytest

from nereid.base.units import format_bytes, format_ms


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (53_100, "53.1 kB"),
        (18_600_000, "18.6 MB"),
        (33_554_432, "32 MiB"),
        (2_500_000_000, "2.5 GB"),
    ],
)
def test_size_has_a_readable_unit(count, text):
    """A small size is not 0.0 MB, and a limit is not 33554432 bytes."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("value_ms", "text"),
    [(0, "0.0 ms"), (0.001, "< 0.01 ms"), (0.04, "0.04 ms"), (12.54, "12.5 ms"), (1250, "1.25 s")],
)
def test_duration_has_a_readable_unit(value_ms, text):
    assert format_ms(value_ms) == text
