"""The architecture and its page; `lint-imports` checks the layers of the package (see `pyproject.toml`)."""

import ast
import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import pytest

from tests.conftest import ROOT

MAX_ROOMS, MAX_LINES, MAX_BODY_LINES = 12, 600, 50
ROOMS = "nereid|python_backend|loadtest|tools|tests"
PACKAGES = ("nereid", "python_backend", "loadtest", "clients")
ADAPTERS = sorted((ROOT / "python_backend").glob("*/model.py"))
# Empty `__init__.py` are not counted as modules.
MODULES = [path for path in sorted((ROOT / "nereid").rglob("*.py")) if path.name != "__init__.py"]
# An adapter of Triton composes these rooms and adds nothing of its own.
ADAPTERS_MAY_IMPORT = {"backends", "base", "tasks", "vision"}


def imported_modules(source: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative imports hide the room"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def test_adapters_import_only_the_library():
    assert ADAPTERS
    for source in ADAPTERS:
        rooms = {name.split(".")[1] for name in imported_modules(source) if name.startswith("nereid.")}
        assert rooms <= ADAPTERS_MAY_IMPORT, source.relative_to(ROOT)


def test_adapters_first_let_go_of_what_they_inherit():
    for source in ADAPTERS:
        nodes = ast.walk(ast.parse(source.read_text()))
        (initialize,) = (node for node in nodes if getattr(node, "name", "") == "initialize")
        _, first, *_ = map(ast.unparse, initialize.body)
        assert first == "stub_processes.close_connections()", source.relative_to(ROOT)


def test_adapters_are_not_packages(root):
    """An `__init__.py` would make an adapter `onnxruntime` shadow the package it wraps."""
    assert not list((root / "python_backend").glob("**/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_environment_is_read_at_the_edge_only(root, package):
    """`os.environ` is read only in modules that are run, so that a library never depends on it silently.

    A default for what others read is set where it must be.
    """
    for source in (root / package).rglob("*.py"):
        text = source.read_text()
        if re.search(r"os\.(environ(?!\.setdefault\()|getenv)", text):
            assert source.name == "__main__.py" or '__name__ == "__main__"' in text, source.relative_to(root)


def test_no_program_starts_a_command():
    """A renamed option would break that at run time only; `nereid.application.launcher` starts functions."""
    started = re.compile(r'"-m",\s*"nereid"|(?:which|with_name)\("nereid"\)')

    assert [path.name for path in MODULES if started.search(path.read_text())] == []


def test_rooms_are_few_and_modules_and_functions_small():
    lines = {path.relative_to(ROOT).as_posix(): path.read_text().count("\n") for path in MODULES}
    bodies = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": node.end_lineno - body_start(node) + 1
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    assert len([*(ROOT / "nereid").glob("*/__init__.py")]) <= MAX_ROOMS
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}
    assert {name: count for name, count in bodies.items() if count > MAX_BODY_LINES} == {}


def body_start(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return function.body[1 if ast.get_docstring(function) and function.body[1:] else 0].lineno


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
