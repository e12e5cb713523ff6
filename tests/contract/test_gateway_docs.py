"""The page about the gateway is complete."""

import re
from dataclasses import fields

import pytest

from nereid.gateway.failures import STATUS
from nereid.gateway.http.operations import OPERATIONS
from nereid.gateway.settings import Settings


@pytest.fixture(scope="module")
def text(root):
    return (root / "docs" / "gateway.md").read_text()


def named(section: str) -> set[str]:
    """Return the code spans in the first two cells of each row."""
    cells = ["|".join(row.split("|")[1:3]) for row in re.findall(r"^\|.*\|$", section, re.M)]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def test_every_operation_is_documented(text):
    operations = {f"{each.method} {each.path}" for each in OPERATIONS}

    assert operations <= named(section(text, "Operations"))


def test_every_error_is_documented(text):
    rows = re.findall(r"^\| ([\d, ]+) \| (.*?) \|", section(text, "Errors"), re.M)
    found = {code: statuses for statuses, cell in rows for code in re.findall(r"`(\w+)`", cell)}

    assert {*found} == {*STATUS}
    assert [code for code, statuses in found.items() if str(STATUS[code]) not in statuses] == []


def test_every_setting_is_documented(text):
    assert named(section(text, "Settings")) - {"classify"} == {each.name for each in fields(Settings)}
