"""Clients identify errors by the texts that the server uses."""

import re

import pytest
from tritonclient.utils import InferenceServerException

from nereid.base import errors
from nereid.client import classifier_errors
from nereid.client.classifier_errors import (
    Overloaded,
    RequestRefused,
    ServerFailed,
    TimedOut,
    Unavailable,
    from_triton,
)

EXPECTED = {
    errors.InvalidRequest: RequestRefused,
    errors.InvalidImage: RequestRefused,
    errors.InferenceFailed: ServerFailed,
    errors.Overloaded: Overloaded,
    errors.DeadlineExceeded: TimedOut,
    errors.Unavailable: Unavailable,
    errors.Died: ServerFailed,
    errors.Cancelled: ServerFailed,
}


@pytest.mark.parametrize("raised", errors._RESTORABLE)
def test_every_prefix_of_the_server_is_known(raised):
    text = f"in ensemble 'classify_v1', {raised('why')}"

    assert type(from_triton(InferenceServerException(text, "500"))) is EXPECTED[raised]


@pytest.mark.parametrize(("text", "raised"), errors._TRITON_TEXTS)
def test_every_text_of_triton_is_known(text, raised):
    assert type(from_triton(InferenceServerException(f"[x] {text} for 'y'", "500"))) is EXPECTED[raised]


def test_only_what_the_server_has_not_seen_is_repeated():
    """A request that may have been computed, or may have killed a process, is not sent again."""
    repeated = {raised for raised, kind in EXPECTED.items() if kind.is_repeatable}

    assert repeated == {errors.Unavailable}


def test_page_has_every_error_and_whether_it_is_repeated(root):
    table = re.findall(
        r"^\| `(\w+)` \| the (\w+): .* \| (yes|no)", (root / "docs/clients.md").read_text(), re.M
    )

    of_caller = [classifier_errors.UnusableImage, classifier_errors.RequestRefused]
    kinds = [*of_caller, ServerFailed, *ServerFailed.__subclasses__()]
    assert table == [(kind.__name__, kind.fault, "yes" if kind.is_repeatable else "no") for kind in kinds]
