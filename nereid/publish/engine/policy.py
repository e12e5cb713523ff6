"""A config's `version_policy`, changed in the text itself: comments and layout stay as they were written."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from nereid.errors import OperationFailed

FIELD = "version_policy"
TOKEN = re.compile(r"""\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{}<>]|\w+""")
OPENING, CLOSING = frozenset("{<"), frozenset("}>")


def with_versions(text: str, versions: Sequence[int]) -> str:
    """Return the text of a config with `versions` as the only ones to be served.

    Raises:
        OperationFailed: the text is no config, or is written in a way that cannot be changed safely.
    """
    wanted = _parse(text)
    wanted.version_policy.Clear()
    wanted.version_policy.specific.versions.extend(sorted(versions))
    policy = f"{FIELD} {{ specific {{ versions: [ {', '.join(map(str, sorted(versions)))} ] }} }}"
    spans = list(_spans(text))
    if spans:
        start, end = spans[-1]
        changed = text[:start] + policy + text[end:]
    else:
        changed = text + "\n" * (bool(text) and not text.endswith("\n")) + policy + "\n"
    if _parse(changed) != wanted:
        raise OperationFailed(f"{FIELD} is written in a way that cannot be changed; fix: write {policy}")
    return changed


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the field stands: from its name to its closing brace."""
    depth, start = 0, None
    for token in TOKEN.finditer(text):
        word = token[0]
        if depth == 0 and word == FIELD:
            start = token.start()
        elif word in OPENING:
            depth += 1
        elif word in CLOSING:
            depth -= 1
            if depth == 0 and start is not None:
                yield start, token.end()
                start = None


def _parse(text: str) -> Any:
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise OperationFailed(f"the config cannot be read: {error}") from None
