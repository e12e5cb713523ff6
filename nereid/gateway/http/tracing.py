"""Request ids and W3C trace context: valid ones are accepted, missing ones are created.

Source: W3C Trace Context, level 1: https://www.w3.org/TR/trace-context/
"""

import random
import re

MAX_ID_LENGTH = 128
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def is_word(value: str, max_length: int = MAX_ID_LENGTH) -> bool:
    """Return whether a value is printable ASCII and not too long."""
    return 0 < len(value) <= max_length and value.isascii() and value.isprintable()


def new_request_id() -> str:
    """Return 32 hexadecimal digits; unique, not secret."""
    return f"{random.getrandbits(128):032x}"


def child_of(traceparent: bytes) -> str | None:
    """Return the `traceparent` of this hop in the caller's trace; None if the value is invalid."""
    if not (found := _TRACEPARENT.fullmatch(traceparent)):
        return None
    version, trace, parent, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or not trace.strip(b"0") or not parent.strip(b"0"):
        return None
    return f"00-{trace.decode()}-{_span()}-{int(flags, 16) & 1:02x}"


def new_traceparent() -> str:
    """Return the `traceparent` of a new trace, not sampled."""
    return f"00-{random.getrandbits(128) or 1:032x}-{_span()}-00"


def _span() -> str:
    return f"{random.getrandbits(64) or 1:016x}"
