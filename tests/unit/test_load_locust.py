"""Locust patches the standard library of whoever imports it, so few may."""

import ast


def imports(source) -> set[str]:
    """Return the modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


PATCHING = {"loadtest.users.locust_users", "loadtest.users.locust_events", "loadtest.locustfile"}


def is_patching(name: str) -> bool:
    return name.split(".")[0] == "locust" or name in PATCHING


def test_only_the_locustfile_and_what_is_for_it_import_locust(root):
    """Tests and measurements that share these modules would get a patched standard library."""
    files = [
        each for room in ("loadtest", "nereid", "clients", "tests") for each in (root / room).rglob("*.py")
    ]

    found = {each.relative_to(root).with_suffix("") for each in files if any(map(is_patching, imports(each)))}

    assert {".".join(each.parts) for each in found} == PATCHING
