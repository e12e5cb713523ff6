"""Texts of a `config.pbtxt`: new ones, and changes that keep the comments and layout of the rest."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf import text_format

from nereid.base.config.model_config import empty_config
from nereid.base.errors import OperationFailed

TOKEN = re.compile(
    r"""\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{}<>\[\]]|[:;,]|[^\s{}<>\[\]:;,"'\#]+"""
)
OPENING, CLOSING = frozenset("{<["), frozenset("}>]")
REWRITTEN_COMMENT = "# Written anew, without comments: the former layout could not be kept."
# The order of fields in a new config, before all others, and the longest line.
ORDER = (
    *("name", "backend", "platform", "max_batch_size", "input", "output"),
    *("version_policy", "instance_group", "dynamic_batching"),
)
WIDTH = 130
# As the configs of this repository are written: `[ 1, 2 ]`.
LIST = {"[": "[ ", "]": " ]"}


def parse(text: str) -> Any:
    """Return the ModelConfig message of a config text; OperationFailed with line and column if invalid."""
    try:
        return text_format.Parse(text, empty_config())
    except text_format.ParseError as error:
        raise OperationFailed(f"cannot read the config: {error}") from None


def format_config(config: Any, head: str, comments: Mapping[str, str] | None = None) -> str:
    """Return the text of a new config, with an entry in each line.

    Args:
        config: the ModelConfig message.
        head: the first line, a comment.
        comments: further ones, by the name of the field, or by the key of the parameter, that they precede.
    """
    parts = list(_parts(config))
    parts.sort(key=lambda part: ORDER.index(part[0]) if part[0] in ORDER else len(ORDER))
    lines, left = [head], dict(comments or {})
    for name, key, part in parts:
        if comment := left.pop(key or name, ""):
            lines.append(f"# {comment}")
        lines += _lines(part)
    return "".join(f"{line}\n" for line in lines)


def rewrite(text: str, target: Any) -> str:
    """Return the text of a config, changed to the message `target`.

    If the text cannot be changed entry by entry, the result is a new text without comments.

    Raises:
        OperationFailed: the text is not a config.
    """
    changed = _edit(text, target)
    return format_config(target, REWRITTEN_COMMENT) if changed is None else changed


def with_versions(text: str, versions: Sequence[int]) -> str:
    """Return the text of a config that serves only `versions`.

    Raises:
        OperationFailed: the text is not a config, or cannot be changed entry by entry.
    """
    config = parse(text)
    config.version_policy.Clear()
    config.version_policy.specific.versions.extend(sorted(versions))
    changed = _edit(text, config)
    if changed is None:
        policy = _print_entry(config, "version_policy", "")
        raise OperationFailed(f"cannot change version_policy in this layout; fix: write {policy}")
    return changed


class _Entry(NamedTuple):
    """An entry of a text: its place, and its field, keys of a map, and number of values, if it has those."""

    begin: int
    stop: int
    text: str
    name: str = ""
    keys: tuple[str, ...] = ()
    values: int = 0


def _edit(text: str, target: Any) -> str | None:
    """Replace, remove and append entries; None if the result would be wrong."""
    changed, missing = _edit_message(text, parse(text), target)
    changed += "\n" * (bool(changed) and not changed.endswith("\n"))
    changed += "".join(f"{entry}\n" for entry in missing)
    try:
        is_right = text_format.Parse(changed, empty_config()) == target
    except text_format.ParseError:
        return None
    return changed if is_right else None


def _edit_message(text: str, current: Any, target: Any) -> tuple[str, list[str]]:
    """Return the entries of a message with their changes, and the entries that are missing.

    Fields with comments are changed inside, all others are printed anew.
    """
    entries = [_entry(text, begin, stop, current) for begin, stop in _entries(text)]
    commented = {
        entry.name for entry in entries if any(token[0] == "#" for token in TOKEN.findall(entry.text))
    }
    pieces = list[str]()
    end = 0
    written = set[tuple[str, str]]()
    counts = Counter[str]()
    for entry in entries:
        new, fields = entry.text, {(entry.name, key) for key in entry.keys}
        if entry.name and not _is_equal(entry, current, target):
            inside = None
            if entry.name in commented:
                inside = _edited_inside(entry, counts[entry.name], current, target)
            printed = [_print_entry(target, *field) for field in sorted(fields) if not fields & written]
            new = " ".join(filter(None, printed)) if inside is None else inside
        written |= fields
        counts[entry.name] += entry.values
        pieces += [text[end : entry.begin], new]
        end = entry.stop
        if not new and (rest_of_line := re.match(r"[ \t]*\n", text[end:])):
            end += rest_of_line.end()
    missing = [_one_line(part) for name, key, part in _parts(target) if (name, key) not in written]
    return "".join([*pieces, text[end:]]), missing


def _entry(text: str, begin: int, stop: int, current: Any) -> _Entry:
    entry = text[begin:stop]
    try:
        ((field, value),) = text_format.Parse(entry, type(current)()).ListFields()
    except (text_format.ParseError, ValueError):
        return _Entry(begin, stop, entry)
    keys, count = tuple(value) if _is_map(value) else ("",), len(value) if hasattr(value, "add") else 1
    return _Entry(begin, stop, entry, field.name, keys, count)


def _is_equal(entry: _Entry, current: Any, target: Any) -> bool:
    before, after = (getattr(message, entry.name) for message in (current, target))
    return bool(
        before == after
        or all(key and key in before and key in after and before[key] == after[key] for key in entry.keys)
    )


def _edited_inside(entry: _Entry, index: int, current: Any, target: Any) -> str | None:
    """Return an entry whose messages are changed in their text; None if they do not correspond.

    Args:
        entry: of a field with messages.
        index: of its first message in a repeated field.
        current, target: the messages with the field.
    """
    before, after = (getattr(message, entry.name) for message in (current, target))
    bodies = [entry.text[begin:stop] for begin, stop in _bodies(entry.text)]
    if _is_map(before):
        kind = before.GetEntryClass()
        old = [text_format.Parse(body, kind()) for body in bodies]
        if any(message.key not in after for message in old):
            return None
        new = [kind(key=message.key, value=after[message.key]) for message in old]
    elif hasattr(before, "add"):
        old, new = (values[index : index + entry.values] for values in (before, after))
        if len(before) != len(after):
            return None
    elif hasattr(before, "ListFields") and target.HasField(entry.name):
        old, new = [before], [after]
    else:
        return None
    if len(bodies) != len(old):
        return None
    pieces, end = list[str](), 0
    for (begin, stop), body, *pair in zip(_bodies(entry.text), bodies, old, new, strict=True):
        pieces += [entry.text[end:begin], _append(*_edit_message(body, *pair))]
        end = stop
    return "".join([*pieces, entry.text[end:]])


def _append(body: str, missing: Sequence[str]) -> str:
    """Append entries to the text in braces, after a comment in the last line."""
    stripped = body.rstrip()
    gap = "\n" if "#" in stripped.rpartition("\n")[2] else " "
    return f"{stripped}{gap}{' '.join(missing)}{body[len(stripped) :] or ' '}" if missing else body


def _bodies(entry: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of the text in the braces of each message of an entry."""
    depth, begin = 0, 0
    for token in TOKEN.finditer(entry):
        if token[0] in "{<":
            begin, depth = begin if depth else token.end(), depth + 1
        elif token[0] in "}>":
            depth -= 1
            if not depth:
                yield begin, token.start()


def _print_entry(message: Any, name: str, key: str) -> str:
    return " ".join(_one_line(part) for *field, part in _parts(message) if field == [name, key])


def _is_map(value: Any) -> bool:
    return hasattr(value, "GetEntryClass")


def _parts(message: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield a message for each entry of a message: its field, its key in a map, and only that entry."""
    for field, value in message.ListFields():
        name = field.name
        if _is_map(value):
            for key in sorted(value):
                part = type(message)()
                if hasattr(value[key], "CopyFrom"):
                    getattr(part, name)[key].CopyFrom(value[key])
                else:
                    getattr(part, name)[key] = value[key]
                yield name, key, part
        elif hasattr(value, "add"):
            for element in value:
                part = type(message)()
                getattr(part, name).add().CopyFrom(element)
                yield name, "", part
        else:
            part = type(message)()
            part.CopyFrom(message)
            for other, _ in message.ListFields():
                if other.name != name:
                    part.ClearField(other.name)
            yield name, "", part


def _lines(part: Any, indent: str = "") -> list[str]:
    """Return the text of a message with one entry: a line, or several if that is too long."""
    ((field, value),) = part.ListFields()
    text = f"{indent}{_one_line(part)}"
    inner = value[0] if hasattr(value, "add") else value
    if len(text) <= WIDTH or not hasattr(inner, "ListFields"):
        return [text]
    more = (line for *_, entry in _parts(inner) for line in _lines(entry, f"{indent}  "))
    return [f"{indent}{field.name} {{", *more, f"{indent}}}"]


def _one_line(part: Any) -> str:
    text = text_format.MessageToString(
        part, as_utf8=True, as_one_line=True, use_short_repeated_primitives=True
    )
    return TOKEN.sub(lambda token: LIST.get(token[0], token[0]), text.strip())


def _entries(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each entry of the outermost level: a field's name and its value."""
    depth, begin, tokens = 0, -1, [token for token in TOKEN.finditer(text) if token[0][0] != "#"]
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
