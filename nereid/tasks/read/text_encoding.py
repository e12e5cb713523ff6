"""Text for consumers that do not read UTF-8."""


class NotInEncoding(ValueError):
    """The text has a character that the encoding does not have."""


def encode_gbk(text: str) -> bytes:
    """Return text in GBK, the encoding of older Chinese systems.

    Raises:
        NotInEncoding: GBK does not have a character; the message has it and its place.
    """
    try:
        return text.encode("gbk")
    except UnicodeEncodeError as error:
        character = text[error.start]
        raise NotInEncoding(
            f"GBK has no {ascii(character)[1:-1] if not character.isprintable() else character} "
            f"(U+{ord(character):04X}) at character {error.start}; fix: use encoding=utf-8"
        ) from None
