"""Locust patches the standard library of whoever imports it, so few may."""

import re

IMPORT = re.compile(r"^\s*(from|import) .*\b(locust|locust_users|locust_events|locustfile)\b", re.M)


def test_only_the_locustfile_and_what_is_for_it_import_locust(root):
    """Tests and measurements that share these modules would get a patched standard library."""
    rooms = ("loadtest", "nereid", "clients", "tests")
    files = [path for room in rooms for path in (root / room).rglob("*.py")]

    found = {str(path.relative_to(root)) for path in files if IMPORT.search(path.read_text())}

    users = {f"loadtest/users/locust_{name}.py" for name in ("events", "users")}
    assert found == {"loadtest/locustfile.py", *users}
