"""Text for consumers that do not read UTF-8."""

import re

import pytest

from nereid.tasks.text_encoding import NotInEncoding, encode_gbk


def test_chinese_text_is_encoded():
    assert encode_gbk("收件人 A1") == b"\xca\xd5\xbc\xfe\xc8\xcb A1"


def test_missing_character_is_named():
    for text, message in (
        ("ok 😀", "GBK has no 😀 (U+1F600) at character 3"),
        ("a\udc80", r"GBK has no \udc80 (U+DC80) at character 1"),
    ):
        with pytest.raises(NotInEncoding, match=re.escape(message)):
            encode_gbk(text)
