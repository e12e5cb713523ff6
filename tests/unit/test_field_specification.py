"""The file that says which fields a document has."""

import json
import re

import pytest
from jsonschema import Draft202012Validator

from nereid.base.assets import TEXT_REPOSITORY
from nereid.base.serving_errors import InvalidConfig
from nereid.tasks.read.fields.shapes import MAX_WAYS, count_ways
from nereid.tasks.read.fields.specification import json_schema, parse_specification, read_specification

WAYBILL = TEXT_REPOSITORY / "read_waybill_v1" / "waybill.json"
FIELD = b'{"name": "a", "formats": [{"pattern": "1"}]}'


def specification(**changes):
    form = {"pattern": r"\d{12}", **changes}
    return json.dumps({"fields": [{"name": "number", "formats": [form]}]}).encode()


def test_published_schema_is_the_one_in_use(root):
    schema = json.loads((root / "docs" / "fields.schema.json").read_text())

    assert schema == json_schema()
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(json.loads(WAYBILL.read_text()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff", "JSON"),
        (b'{"fields": []}', "Expected `array` of length >= 1"),
        (specification(checksum="crc"), "Invalid enum value 'crc'"),
        (specification(paterns=""), "Object contains unknown field `paterns`"),
        (specification(pattern="("), "pattern '(': missing ), unterminated subpattern"),
        (specification(pattern="(a+)+"), "pattern '(a+)+': expected at most 1,000 ways to match, got more"),
        (specification(pattern="(a|a){30}"), "pattern '(a|a){30}': expected at most 1,000 ways"),
        (specification(pattern=r"(\d)\1"), r"pattern '(\d)\1': expected at most 1,000 ways"),
        (specification(pattern=".{12}", checksum="gs1"), "pattern '.{12}': expected letters, digits"),
        (specification(checksum="gs1", joined=False), "expected joined with a checksum"),
        (specification(examples=["12"]), r"pattern '\d{12}': expected the example to fit: '12'"),
        (
            specification(counterexamples=["1234 5678 9012"]),
            "the counterexample not to fit: '1234 5678 9012'",
        ),
        (b'{"fields": [{"name": "a"}]}', "field 'a': expected formats or carriers, got none"),
        (b'{"fields": [%s, %s]}' % (FIELD, FIELD), "names of fields must differ, got a, a"),
        (specification(needs_label=True), "field 'number': expected labels for a format with needs_label"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_wrong_file_is_rejected(text, message):
    with pytest.raises(InvalidConfig) as error:
        parse_specification(text)

    assert message in str(error.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(
        InvalidConfig, match=re.escape(f"cannot read '{tmp_path / 'none.json'}': No such file")
    ):
        read_specification(tmp_path / "none.json")


def test_ways_are_counted():
    ways = {"abc": 1, r"\d{2,4}": 3, r"\d+": 64, "ab|cd|e": 3, "(?:a?b?)c": 4, "(?:ab?)?": 3, "(?:ab?){2}": 4}

    assert {pattern: count_ways(pattern) for pattern in ways} == ways
    assert [count_ways(pattern) for pattern in ("(a*)*", "(?=a*)b*")] == [MAX_WAYS + 1] * 2
