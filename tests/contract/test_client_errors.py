"""Clients identify errors by the texts that the server uses."""

import re

import pytest
from tritonclient.utils import InferenceServerException

from nereid.base import contract
from nereid.client import client_errors

EXPECTED = {
    "invalid_request": client_errors.RequestRefused,
    "invalid_image": client_errors.RequestRefused,
    "inference_failed": client_errors.ServerFailed,
    "overloaded": client_errors.Overloaded,
    "deadline_exceeded": client_errors.TimedOut,
    "unavailable": client_errors.Unavailable,
    "stub_died": client_errors.ServerFailed,
    "cancelled": client_errors.ServerFailed,
}


@pytest.mark.parametrize(("text", "code"), contract.CODES_BY_TEXT.items(), ids=str)
def test_every_text_of_the_server_is_known(text, code):
    exception = InferenceServerException(f"in ensemble 'classify_v1', {text} for 'y'", "500")

    assert type(client_errors.from_triton(exception)) is EXPECTED[code]


def test_page_has_every_error_and_whether_it_is_repeated(root):
    page = (root / "docs/clients.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| the (\w+): .* \| (yes|no)", page, re.M)

    of_caller = [client_errors.UnusableImage, client_errors.RequestRefused]
    kinds = [*of_caller, client_errors.ServerFailed, *client_errors.ServerFailed.__subclasses__()]
    assert table == [(kind.__name__, kind.fault, "yes" if kind.is_repeatable else "no") for kind in kinds]
