"""The walks of docs/architecture.md name code that exists."""

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

WALKS = ("The walk of an image", "The walk of a publish", "The walk of a line of code")
ROOMS = ("nereid", "python_backend", "loadtest", "tools", "tests")


def page() -> str:
    return (ROOT / "docs" / "architecture.md").read_text()


def missing_path(name: str) -> str | None:
    """Return why a file or folder that the page names is missing, or None."""
    return None if (ROOT / name).exists() else f"{name}: there is no such file or folder"


def missing_name(dotted: str) -> str | None:
    """Return why `nereid.room.module.Class.method` is missing, or None; nothing is imported."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if source.is_file():
            return _missing_in(source, parts[count:], dotted)
    return f"{dotted}: there is no such module"


def _missing_in(source: Path, names: list[str], dotted: str) -> str | None:
    body = ast.parse(source.read_text()).body
    for position, name in enumerate(names):
        found = [node for node in body if name in _defined(node)]
        if not found:
            is_public = position == 0 and name in _exported(body)
            return None if is_public else f"{dotted}: {source.relative_to(ROOT)} has no {name}"
        body = getattr(found[0], "body", [])
    return None


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def _exported(body: list[ast.stmt]) -> set[str]:
    """Return the names in `__all__`, which a lazy package defines nowhere else."""
    lists = [node.value for node in body if isinstance(node, ast.Assign) and "__all__" in _defined(node)]
    return {name for each in lists for name in ast.literal_eval(each)}


def test_every_named_module_and_function_exists():
    spans = re.findall(r"`([^`\n]+)`", page())
    rooms = "|".join(ROOMS)
    paths = [span for span in spans if re.fullmatch(rf"(?:{rooms})/[\w./]*", span)]
    names = [span for span in spans if re.fullmatch(r"(?:nereid|loadtest|tests)(?:\.\w+)+(?:\(\))?", span)]

    problems = [*map(missing_path, paths), *(missing_name(name.removesuffix("()")) for name in names)]

    assert [problem for problem in problems if problem] == []


@pytest.mark.parametrize("walk", WALKS)
def test_each_walk_names_its_code(walk):
    _, _, rest = page().partition(f"\n## {walk}\n")
    section = rest.partition("\n## ")[0]

    assert len(set(re.findall(r"`((?:nereid|python_backend|tests)[./][\w./]+)`", section))) >= 6


@pytest.mark.parametrize(
    ("dotted", "is_missing"),
    [
        ("nereid.imaging.pipeline", False),
        ("nereid.imaging.pipeline.Pipeline.run", False),
        ("nereid.imaging.pipeline.IMAGE", False),
        ("nereid.imaging.pipeline.Pipeline.walk", True),
        ("nereid.imaging.pipelin.Pipeline", True),
        ("nereid.nowhere", True),
    ],
)
def test_planted_names_are_found(dotted, is_missing):
    assert (missing_name(dotted) is not None) == is_missing
