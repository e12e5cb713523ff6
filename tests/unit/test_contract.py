"""The wire contract: each text that is read again is read as it was written."""

import re

from hypothesis import given
from hypothesis import strategies as st

from nereid.base import contract

REASONS = st.dictionaries(st.integers(0, 15), st.text(), min_size=1)


@given(
    reasons=REASONS, more=st.integers(0, 4), prefix=st.sampled_from(["", "in ensemble 'x', invalid image: "])
)
def test_bad_images_are_read_as_they_were_written(reasons, more, prefix):
    count = max(reasons) + 1 + more

    found = contract.read_bad_images(prefix + contract.format_bad_images(reasons, count), count)

    is_ambiguous = any(re.search(r"; image \d+: |^image \d+: ", reason) for reason in reasons.values())
    assert found == contract.BadImages(prefix, reasons) or (is_ambiguous and found.reasons == {})


def test_list_that_does_not_fit_is_empty():
    """A wrong list must not put the blame on an image."""
    for text in (
        "1 of 3 images cannot be used: image 0: bad",
        "2 of 2 images cannot be used: image 0: bad",
        "1 of 2 images cannot be used: image 2: bad",
        "1 of 2 images cannot be used: bad",
        "0 of 2 images cannot be used: ",
    ):
        assert contract.read_bad_images(text, 2) == contract.BadImages("", {}), text


def test_other_text_has_no_list():
    assert contract.read_bad_images("invalid image: expected an image file", 2) is None


def test_batch_limit_is_read():
    text = "inference request batch-size must be <= 8 for 'classify'"

    assert (contract.read_batch_limit(text), contract.read_batch_limit("invalid request: why")) == (8, None)


def test_report_of_a_failed_device_is_read_as_it_was_written():
    """The supervisor takes only the process from the log."""
    line = contract.format_failed_device(41, "'net' version 1", "CUDA failure 700")

    assert contract.read_failed_device(line) == 41
    assert contract.read_failed_device(f"loading {line}") is None
