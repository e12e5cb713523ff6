"""A task is one folder: other rooms read its record, and none of them names a task."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import nereid
from nereid.base.task import Task
from nereid.base.task_registry import DEFAULT_TASK, TASKS
from tests.conftest import ROOT
from tests.contract.test_layers import imported_modules

PACKAGE = ROOT / "nereid"
FOLDERS = sorted(path.parent.name for path in PACKAGE.glob("tasks/*/__init__.py"))
# Every module of the package that is not in the folder of a task.
OUTSIDE = [path for path in sorted(PACKAGE.rglob("*.py")) if not path.is_relative_to(PACKAGE / "tasks")]
NAMES = {task.name for task in TASKS}
# Words that are equal to the name of a task, but mean something else, by module.
OTHER_MEANINGS = {"nereid/client/images.py": {"read"}}  # a method of files
ENTRY_POINTS = [
    pytest.param(task, name, id=f"{task.name}-{name}") for task in TASKS for name in task.entry_points
]


def words(source: Path) -> Iterator[tuple[int, str]]:
    """Yield the string literals of a module with their lines; a docstring is text, not code."""
    tree = ast.parse(source.read_text())
    expressions = (node for node in ast.walk(tree) if isinstance(node, ast.Expr))
    texts = {id(node.value) for node in expressions if isinstance(node.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.lineno, node.value


def test_folders_are_the_tasks():
    assert sorted({task.extends or task.name for task in TASKS}) == FOLDERS
    assert [task for task in TASKS if task.is_default] == [DEFAULT_TASK]
    for values in ([task.name for task in TASKS], [task.path for task in TASKS]):
        assert sorted({*values}) == sorted(values)
    assert {task.extends for task in TASKS} <= {"", *NAMES}


def test_no_module_outside_imports_a_task(root):
    """`nereid/__init__.py` offers the public names of all tasks, for type checkers, too."""
    of_a_task = tuple(f"nereid.tasks.{folder}." for folder in FOLDERS)
    imports = {
        path.relative_to(root).as_posix(): names
        for path in OUTSIDE
        if path != PACKAGE / "__init__.py"
        and (names := sorted(name for name in imported_modules(path) if f"{name}.".startswith(of_a_task)))
    }

    assert imports == {}


def test_no_module_outside_names_a_task(root):
    places = {
        f"{path.relative_to(root)}:{line}": word
        for path in OUTSIDE
        for line, word in words(path)
        if word in NAMES - OTHER_MEANINGS.get(path.relative_to(root).as_posix(), set())
    }

    assert places == {}


def test_every_other_meaning_is_still_there(root):
    """An exception that is no longer needed would hide the next name."""
    for name, meanings in OTHER_MEANINGS.items():
        assert meanings <= {word for _, word in words(root / name)}, name


@pytest.mark.parametrize(("task", "name"), ENTRY_POINTS)
def test_every_entry_point_resolves(task: Task, name: str):
    assert task.entry_point(name) is not None


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_entry_points_of_a_task_agree(task: Task):
    result = task.entry_point("result")

    assert {*result.outputs} <= {*task.outputs}
    assert task.entry_point("client").kind is task.entry_point("async_client").kind is result
    assert {*task.entry_point("outputs")(task.outputs, ()).outputs} <= {*task.outputs}
    for module, names in task.public.items():
        for name in names:
            assert getattr(nereid, name).__module__ == f"nereid.tasks.{task.name}.{module}"
