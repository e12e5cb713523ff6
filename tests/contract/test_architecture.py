"""The walks of docs/architecture.md name code that exists."""

import re
import sys
from pkgutil import resolve_name
from types import ModuleType

import pytest

from tests.conftest import ROOT

WALKS = ("The walk of an image", "The walk of a publish", "The walk of a line of code")
ROOMS = ("nereid", "python_backend", "loadtest", "tools", "tests")


def page() -> str:
    return (ROOT / "docs" / "architecture.md").read_text()


def missing(name: str) -> bool:
    """Return whether a path, or a dotted name such as `nereid.room.module.Class.method`, does not exist."""
    if "/" in name:
        return not (ROOT / name).exists()
    try:
        resolve_name(name)
    except (AttributeError, ImportError):
        return True
    return False


def test_every_named_module_and_function_exists(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", ModuleType("that of a stub"))
    spans = re.findall(r"`([^`\n]+)`", page())
    rooms = "|".join(ROOMS)
    paths = [span for span in spans if re.fullmatch(rf"(?:{rooms})/[\w./]*", span)]
    names = [span for span in spans if re.fullmatch(r"(?:nereid|loadtest|tests)(?:\.\w+)+(?:\(\))?", span)]

    assert [name for name in (*paths, *(name.removesuffix("()") for name in names)) if missing(name)] == []


@pytest.mark.parametrize("walk", WALKS)
def test_each_walk_names_its_code(walk):
    _, _, rest = page().partition(f"\n## {walk}\n")
    section = rest.partition("\n## ")[0]

    assert len(set(re.findall(r"`((?:nereid|python_backend|tests)[./][\w./]+)`", section))) >= 6


def test_planted_names_are_found():
    names = ("nereid/nowhere.py", "nereid.nowhere", "nereid.imaging.pipeline.Pipeline.walk")

    assert [missing(name) for name in (*names, "nereid.imaging.pipeline.Pipeline.run")] == [
        True,
        True,
        True,
        False,
    ]
