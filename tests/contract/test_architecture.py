"""The walks of docs/architecture.md name code that exists."""

import re
import sys
from pkgutil import resolve_name
from types import ModuleType

from tests.conftest import ROOT

ROOMS = "nereid|python_backend|loadtest|tools|tests"


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
    page, _, _ = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Decisions")
    spans = re.findall(r"`([^`\n]+)`", page)
    paths = [span for span in spans if re.fullmatch(rf"(?:{ROOMS})/[\w./]*", span)]
    names = [span for span in spans if re.fullmatch(r"(?:nereid|loadtest|tests)(?:\.\w+)+(?:\(\))?", span)]

    assert [name for name in (*paths, *(name.removesuffix("()") for name in names)) if missing(name)] == []
