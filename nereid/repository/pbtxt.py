"""A config.pbtxt changed in its text: what is not changed stays as it was written, with its comments."""

import re
from collections.abc import Iterator
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from nereid.errors import OperationFailed

TOKEN = re.compile(
    r"""\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{}<>\[\]]|[:;,]|[^\s{}<>\[\]:;,"'\#]+"""
)
OPENING, CLOSING = frozenset("{<["), frozenset("}>]")
MAP = "parameters"


def parse(text: str) -> Any:
    """Return the ModelConfig that a text is.

    Raises:
        OperationFailed: it is none.
    """
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise OperationFailed(f"the config cannot be read: {error}") from None


def rewritten(text: str, wanted: Any) -> str:
    """Return the text of a config changed such that it is `wanted`.

    Where it is written in a way that cannot be changed piece by piece, it is written anew, without comments.

    Raises:
        OperationFailed: the text is no config.
    """
    present = parse(text)
    pieces, end, done = [], 0, set[tuple[str, str]]()
    for begin, stop in _entries(text):
        new = _entry(text[begin:stop], present, wanted, done)
        pieces += [text[end:begin], new]
        end = stop
        if not new and (rest_of_line := re.match(r"[ \t]*\n", text[stop:])):
            end += rest_of_line.end()
    changed = "".join([*pieces, text[end:]])
    changed += "\n" * (bool(changed) and not changed.endswith("\n"))
    changed += "".join(f"{each}\n" for each in _missing(wanted, done))
    try:
        is_right = text_format.Parse(changed, ModelConfig()) == wanted
    except text_format.ParseError:
        is_right = False
    return changed if is_right else text_format.MessageToString(wanted)


def _entry(entry: str, present: Any, wanted: Any, done: set[tuple[str, str]]) -> str:
    """Return what an entry of the text becomes, and note which of the wanted ones are written."""
    try:
        ((field, value),) = text_format.Parse(entry, ModelConfig()).ListFields()
    except (text_format.ParseError, ValueError):
        return entry
    name, key = field.name, next(iter(value), "") if field.name == MAP else ""
    is_first = (name, key) not in done
    done.add((name, key))
    before, after = (getattr(each, name) for each in (present, wanted))
    if before == after or (key and key in before and key in after and before[key] == after[key]):
        return entry
    is_wanted = key in after if name == MAP else any(each.name == name for each, _ in wanted.ListFields())
    return _printed(wanted, name, key) if is_first and is_wanted else ""


def _missing(wanted: Any, done: set[tuple[str, str]]) -> Iterator[str]:
    for field, value in wanted.ListFields():
        for key in value if field.name == MAP else [""]:
            if (field.name, key) not in done:
                yield _printed(wanted, field.name, key)


def _printed(wanted: Any, name: str, key: str) -> str:
    part = ModelConfig()
    if name == MAP:
        part.parameters[key].CopyFrom(wanted.parameters[key])
    else:
        part.MergeFrom(wanted)
        for field, _ in part.ListFields():
            if field.name != name:
                part.ClearField(field.name)
    return str(text_format.MessageToString(part, as_one_line=True).strip())


def _entries(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each entry of the outermost level stands: from its name to the end of its value."""
    depth, begin, tokens = 0, -1, [each for each in TOKEN.finditer(text) if each[0][0] != "#"]
    for token, after in zip(tokens, [*tokens[1:], None], strict=False):
        word = token[0]
        if word in OPENING:
            depth += 1
        elif word in CLOSING:
            depth -= 1
        elif begin < 0 and word not in ":;,":
            begin = token.start()
            continue
        is_value_next = after is not None and (after[0] in OPENING or after[0] == ":")
        if depth == 0 and begin >= 0 and word != ":" and not is_value_next:
            yield begin, token.end()
            begin = -1
