"""Human-readable numbers with units, line splitting, and text that is safe to print on a terminal."""

# Control characters (C0, DEL, C1), line separators, text direction marks, and bytes that are not text.
# Line breaks and tabs are harmless.
_CODES = {
    *range(0xA0),
    0x2028,
    0x2029,
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
}
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in sorted(_CODES - {*range(0x20, 0x7F), *map(ord, "\n\t")})}


def escaped(text: str) -> str:
    """Escape the characters that would control a terminal."""
    return text.translate(_ESCAPES)


def split_lines(text: str) -> list[str]:
    """Split a text into lines, dropping empty ones at the end; only LF and CR LF break lines."""
    trimmed = text.replace("\r\n", "\n").rstrip("\n")
    return trimmed.split("\n") if trimmed else []


def format_bytes(count: int) -> str:
    """Return a size such as `512 bytes`, `53.1 kB`, `18.6 MB`, or `32 MiB` for whole mebibytes."""
    if count and count % 2**20 == 0:
        return f"{count // 2**20} MiB"
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def format_duration(seconds: float) -> str:
    """Return a duration such as `42 s`, `12 min`, `5 h 20 min` or `3 d 4 h`."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"


def format_ms(value_ms: float) -> str:
    """Return a duration such as `0.04 ms`, `12.5 ms` or `1.25 s`; `0.0 ms` only for zero."""
    if value_ms >= 1000:
        return f"{value_ms / 1000:.2f} s"
    if value_ms >= 1 or value_ms <= 0:
        return f"{value_ms:.1f} ms"
    return f"{value_ms:.2f} ms" if value_ms >= 0.005 else "< 0.01 ms"


def parse_share(text: str) -> float:
    """Parse a traffic share such as `10%` or `0.1` as a number.

    Raises:
        ValueError: the text is not a number.
    """
    number = text.removesuffix("%")
    try:
        return float(number) / (100 if number != text else 1)
    except ValueError:
        raise ValueError(f"expected a share such as 10% or 0.1, got '{text[:64]}'") from None


_UNITS_S = {"s": 1, "m": 60, "h": 3600}


def parse_duration(text: str) -> float:
    """Parse a duration such as `30s`, `5m` or `1h`, and return its seconds.

    Raises:
        ValueError: the text is not a duration.
    """
    number, unit = text[:-1], text[-1:]
    if (
        not (number.isascii() and number.isdigit() and len(number) <= 6 and int(number))
        or unit not in _UNITS_S
    ):
        raise ValueError(f"expected a duration such as 30s, 5m or 1h, got '{text[:32]}'")
    return float(int(number) * _UNITS_S[unit])
