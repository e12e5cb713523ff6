"""Clients identify errors by the texts that the server uses."""

import re

import pytest
from tritonclient.utils import InferenceServerException

from nereid.base import contract
from nereid.client import classifier_errors

EXPECTED = {
    "invalid_request": classifier_errors.RequestRefused,
    "invalid_image": classifier_errors.RequestRefused,
    "inference_failed": classifier_errors.ServerFailed,
    "overloaded": classifier_errors.Overloaded,
    "deadline_exceeded": classifier_errors.TimedOut,
    "unavailable": classifier_errors.Unavailable,
    "stub_died": classifier_errors.ServerFailed,
    "cancelled": classifier_errors.ServerFailed,
}


@pytest.mark.parametrize(("text", "code"), contract.CODES_BY_TEXT.items(), ids=str)
def test_every_text_of_the_server_is_known(text, code):
    exception = InferenceServerException(f"in ensemble 'classify_v1', {text} for 'y'", "500")

    assert type(classifier_errors.from_triton(exception)) is EXPECTED[code]


def test_page_has_every_error_and_whether_it_is_repeated(root):
    page = (root / "docs/clients.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| the (\w+): .* \| (yes|no)", page, re.M)

    of_caller = [classifier_errors.UnusableImage, classifier_errors.RequestRefused]
    kinds = [*of_caller, classifier_errors.ServerFailed, *classifier_errors.ServerFailed.__subclasses__()]
    assert table == [(kind.__name__, kind.fault, "yes" if kind.is_repeatable else "no") for kind in kinds]
