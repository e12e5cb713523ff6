"""Clients identify errors by the texts that the server uses."""

import re

import pytest
from tritonclient.utils import InferenceServerException

from nereid.base import errors
from nereid.client import classifier_errors

EXPECTED = {
    errors.InvalidRequest: classifier_errors.RequestRefused,
    errors.InvalidImage: classifier_errors.RequestRefused,
    errors.InferenceFailed: classifier_errors.ServerFailed,
    errors.Overloaded: classifier_errors.Overloaded,
    errors.DeadlineExceeded: classifier_errors.TimedOut,
    errors.Unavailable: classifier_errors.Unavailable,
    errors.StubDied: classifier_errors.ServerFailed,
    errors.Cancelled: classifier_errors.ServerFailed,
}


@pytest.mark.parametrize("raised", errors._RESTORABLE)
def test_every_prefix_of_the_server_is_known(raised):
    text = f"in ensemble 'classify_v1', {raised('why')}"

    assert type(classifier_errors.from_triton(InferenceServerException(text, "500"))) is EXPECTED[raised]


@pytest.mark.parametrize(("text", "raised"), errors._TRITON_TEXTS)
def test_every_text_of_triton_is_known(text, raised):
    exception = InferenceServerException(f"[x] {text} for 'y'", "500")

    assert type(classifier_errors.from_triton(exception)) is EXPECTED[raised]


def test_page_has_every_error_and_whether_it_is_repeated(root):
    page = (root / "docs/clients.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| the (\w+): .* \| (yes|no)", page, re.M)

    of_caller = [classifier_errors.UnusableImage, classifier_errors.RequestRefused]
    kinds = [*of_caller, classifier_errors.ServerFailed, *classifier_errors.ServerFailed.__subclasses__()]
    assert table == [(kind.__name__, kind.fault, "yes" if kind.is_repeatable else "no") for kind in kinds]
