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


def is_patching(name: str) -> bool:
    """Tell whether to import this patches."""
    return name.split(".")[0] == "locust" or name in {
        "loadtest.users.locust_users",
        "loadtest.users.locust_events",
        "loadtest.locustfile",
    }


def test_only_the_locustfile_and_what_is_for_it_import_locust(root):
    """Tests and measurements that share these modules would get a patched standard library."""
    files = [
        each for room in ("loadtest", "nereid", "clients", "tests") for each in (root / room).rglob("*.py")
    ]
    found = {
        each.relative_to(root).as_posix()
        for each in files
        if any(is_patching(name) for name in imports(each))
    }

    assert found == {
        "loadtest/users/locust_users.py",
        "loadtest/users/locust_events.py",
        "loadtest/locustfile.py",
    }
