"""Changes of configs in their text: the change is correct, and the rest keeps its text."""

import pytest

from nereid.base.errors import OperationFailed
from nereid.repository.pbtxt import parse, rewrite, with_versions
from tests.conftest import ROOT
from tests.tables import cases

CONFIGS = sorted((ROOT / "model_repository").rglob("*.pbtxt"))
TEXT = """# What it is for.
name: "net"
max_batch_size: 8  # as clients know it
input { name: "a{b" data_type: TYPE_FP32 dims: [ 3, 4 ] }
input < name: 'c' data_type: TYPE_FP32 dims: 1 >
# Two instances.
instance_group [ { kind: KIND_CPU count: 2 } ]
# Kept apart.
parameters { key: "first" value { string_value: "1" } }
# Goes.
parameters: { key: "second" value: { string_value: "2" } }
dynamic_batching {}
"""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_unchanged_text_stays(path):
    text = path.read_text()

    assert rewrite(text, parse(text)) == text


def test_only_what_changes_is_written_anew():
    wanted = parse(TEXT)
    wanted.max_batch_size = 16
    wanted.instance_group[0].count = 3
    wanted.dynamic_batching.max_queue_delay_microseconds = 500
    del wanted.parameters["second"]
    wanted.parameters["third"].string_value = "3"
    wanted.version_policy.all.SetInParent()

    changed = rewrite(TEXT, wanted)

    assert parse(changed) == wanted
    expected = TEXT.replace("max_batch_size: 8", "max_batch_size: 16")
    expected = expected.replace("[ { kind: KIND_CPU count: 2 } ]", "{ count: 3 kind: KIND_CPU }")
    expected = expected.replace('parameters: { key: "second" value: { string_value: "2" } }\n', "")
    expected = expected.replace("{}", "{ max_queue_delay_microseconds: 500 }")
    third = 'parameters { key: "third" value { string_value: "3" } }'
    assert changed == expected + "version_policy { all { } }\n" + third + "\n"


@cases(
    "text",
    list_and_entry="instance_group [ { count: 1 }, { count: 2 } ] instance_group { count: 4 }",
    joined_strings='name: "a" "b" max_batch_size: 8',
)
def test_unusual_layout_is_written_anew(text):
    wanted = parse(text)
    wanted.max_batch_size = 16
    del wanted.instance_group[1:]

    assert parse(rewrite(text, wanted)) == wanted


def test_text_that_is_not_a_config_is_an_error():
    with pytest.raises(OperationFailed, match="cannot read the config: 1:1 : "):
        rewrite("what: 1", parse(""))


POLICY = "version_policy { specific { versions: [ 1, 3 ] } }"


@cases(
    ("text", "expected"),
    empty=("", f"{POLICY}\n"),
    latest_and_comment=(
        "# {\nversion_policy { latest { num_versions: 2 } } # why\nname: 'a'\n",
        f"# {{\n{POLICY} # why\nname: 'a'\n",
    ),
    angle_brackets=("version_policy: <\n  all: <>\n>\nname: 'a}'", f"{POLICY}\nname: 'a}}'\n"),
    a_parameter_of_that_name=(
        'parameters { key: "version_policy" value { string_value: "{" } }\n',
        f'parameters {{ key: "version_policy" value {{ string_value: "{{" }} }}\n{POLICY}\n',
    ),
)
def test_only_the_policy_changes_with_the_versions(text, expected):
    assert with_versions(text, [3, 1]) == expected


def test_change_of_versions_never_removes_a_comment():
    with pytest.raises(OperationFailed, match=r"fix: write version_policy .*\[ 1, 2 \]") as refused:
        with_versions('# why\nname: "a" "b" max_batch_size: 8', [1, 2])

    assert "cannot change version_policy in this layout" in str(refused.value)
