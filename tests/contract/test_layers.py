"""The architecture as a test: which room may import which, lazy imports included."""

import ast
import re
from pathlib import Path

import pytest

MAY_IMPORT = {
    "python_backend": set(),
    "clients": set(),
    "loadtest": {"python_backend", "clients", "ops"},
    "ops": {"python_backend", "clients"},
}
# Only the command table may import any room.
COMMAND_TABLE = "ops/__main__.py"
# Inside the library each module may import those before it, and `model.py` adapters all of them.
LIBRARY = [
    {"errors", "buffers", "inherited", "metrics"},
    {"model_config", "server_flags", "gpu", "exchange", "deadline"},
    {"decode", "resample", "threads", "signature", "batching"},
    {"transform", "session_options", "routing"},
    {"shared_weights", "preprocessor", "preprocess_kernel", "preprocess_settings"},
    {"route_file", "breaker", "shadows"},
    {"session", "gpu_preprocessor", "router"},
    {"pipeline"},
    {"triton_io"},
    {"triton_session"},
]


def imported_modules(source: Path) -> set[str]:
    """Return every module a file imports, wherever in the file."""
    modules = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative imports hide the room"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def imported_rooms(source: Path) -> set[str]:
    """Return the rooms of ours a file imports from."""
    return {module.split(".")[0] for module in imported_modules(source)} & {*MAY_IMPORT, "tests"}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_room_imports_only_what_it_may(root, room):
    """Every file of the room stays within its row of MAY_IMPORT."""
    sources = sorted((root / room).rglob("*.py"))
    assert sources, f"{room} has no Python files; is the root right?"

    for source in sources:
        allowed = {*MAY_IMPORT} if source == root / COMMAND_TABLE else MAY_IMPORT[room] | {room}
        assert imported_rooms(source) <= allowed, source.relative_to(root)


def test_adapters_first_let_go_of_what_they_inherit(root):
    """Every stub is started with the connections of the server's callers; see `python_backend.inherited`."""
    adapters = sorted((root / "python_backend").glob("*/model.py"))
    assert adapters

    for source in adapters:
        (initialize,) = [
            node
            for node in ast.walk(ast.parse(source.read_text()))
            if isinstance(node, ast.FunctionDef) and node.name == "initialize"
        ]
        _, first, *_ = map(ast.unparse, initialize.body)
        assert first == "inherited.close_connections()", source.relative_to(root)


def test_library_modules_form_layers(root):
    """Each module imports only what stands in a row of LIBRARY before its own."""
    known: set[str] = set()
    for layer in LIBRARY:
        for name in layer:
            modules = imported_modules(root / "python_backend" / f"{name}.py")
            ours = {module.split(".")[1] for module in modules if module.startswith("python_backend.")}
            assert ours <= known, name
            assert name == "triton_io" or "triton_python_backend_utils" not in modules, name
        known |= layer

    files = {path.stem for path in (root / "python_backend").glob("*.py")} - {"__init__"}
    assert files == known


def test_adapters_are_no_packages(root):
    """An `__init__.py` would make `python_backend.onnxruntime` shadow what it wraps."""
    assert not list((root / "python_backend").glob("*/__init__.py"))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_environment_is_read_at_the_edge_only(root, room):
    """`os.environ` is read only in modules that are run, so that a library never depends on it silently.

    A default for what others read is set where it must be.
    """
    for source in (root / room).rglob("*.py"):
        text = source.read_text()
        if re.search(r"os\.(environ(?!\.setdefault\()|getenv)", text):
            assert source.name == "__main__.py" or '__name__ == "__main__"' in text, source.relative_to(root)
