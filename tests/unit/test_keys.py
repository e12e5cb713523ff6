"""API keys of the gateway: their file, and the commands that change it."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from typer.testing import CliRunner

from nereid.base.errors import OperationFailed
from nereid.cli.main import app
from nereid.gateway import key_changes
from nereid.gateway.keys import SCOPES, InvalidKeys, KeyFile, KeyRing, format_keys
from tests.tables import cases, rows


@pytest.fixture
def nereid(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return lambda *words: CliRunner().invoke(app, ["key", *words])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "nereid" / "keys.json"


@pytest.mark.parametrize("scopes", [{"infer", "route"}, {"admin"}], ids=["two scopes", "admin"])
def test_key_is_shown_once_and_kept_as_digest(nereid, path, scopes):
    flags = [f"--scope={scope}" for scope in scopes]
    secret = nereid("add", "alice", *flags, "--rate", "5").stdout.strip()

    key = KeyRing(path).find(secret)
    assert re.fullmatch(r"nereid_[\w-]{43}", secret)
    assert [key.may(scope) for scope in SCOPES] == [True, True, scopes == {"admin"}]
    assert (key.name, key.rate_per_s) == ("alice", 5)
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_ring_takes_changes_of_its_file(nereid, path):
    first = nereid("add", "first", "--scope", "infer").stdout.strip()
    ring = KeyRing(path)
    second = nereid("add", "second", "--scope", "infer").stdout.strip()
    assert (ring.find(first).name, ring.find(second).name, len(ring)) == ("first", "second", 2)

    assert nereid("revoke", "first").exit_code == 0

    assert ring.find(first) is None
    assert ring.find(second).name == "second"
    path.unlink()
    assert ring.find(second) is None
    assert "No such file" in ring.failure


@rows(
    (["add", "bob", "--scope", "infer", "--scope", "all"], 2, "infer, route, admin, got infer, all"),
    (["add", "", "--scope", "infer"], 2, "NAME: expected 1 to 64 printable ASCII characters, got ''"),
    (["add", "0123abcd", "--scope", "infer"], 2, "expected a name that does not look like an id"),
    (["add", "alice", "--scope", "infer"], 1, "'alice' already has a key; fix: nereid key revoke"),
    (["revoke", "carol"], 1, "has no key 'carol', known keys: alice"),
)
def test_wrong_command_changes_nothing(words, status, text, nereid, path):
    nereid("add", "alice", "--scope", "infer")
    before = path.read_bytes()

    result = nereid(*words)

    assert result.exit_code == status
    assert text in result.stderr
    assert path.read_bytes() == before


@cases(
    no_key=('{"keys": [{"id": "x"}]}', 0o600, "is not a key file"),
    writable_by_others=('{"keys": []}', 0o622, "can be changed by others; fix: chmod 600"),
    too_large=(" " * 1_000_001, 0o600, "expected at most 1,000,000 bytes, got more"),
    # Reading a named pipe would block the gateway.
    pipe=(None, 0o600, "expected a regular file"),
)
def test_unusable_file_is_refused(text, mode, reason, path):
    path.parent.mkdir()
    os.mkfifo(path) if text is None else path.write_text(text)
    path.chmod(mode)

    with pytest.raises(InvalidKeys, match=reason):
        KeyRing(path)


def test_file_that_becomes_invalid_rejects_all_keys(nereid, path, caplog):
    secret = nereid("add", "alice", "--scope", "infer").stdout.strip()
    ring = KeyRing(path)
    path.write_text("{")

    for _ in range(2):
        assert ring.find(secret) is None
    nereid("revoke", "alice")

    (record,) = caplog.records
    assert (record.name, record.levelname) == ("nereid.gateway", "WARNING")
    assert "is not a key file" in record.message


def test_file_may_come_later_unless_it_is_named(nereid, path):
    made = key_changes.open_ring(None, {"XDG_CONFIG_HOME": str(path.parent.parent)})
    assert len(made) == 0

    secret = nereid("add", "alice", "--scope", "infer").stdout.strip()

    assert made.find(secret).name == "alice"
    with pytest.raises(OperationFailed, match="No such file"):
        key_changes.open_ring(path.with_name("none"), {})


def test_name_goes_before_id(path):
    for name in ("alice", "bob"):
        key_changes.add(path, name, ["infer"], None)
    alice, bob = key_changes.known_keys(path)
    path.write_bytes(format_keys(KeyFile((alice, msgspec.structs.replace(bob, name=alice.id)))))

    for left in ((alice,), ()):
        key_changes.revoke(path, alice.id)
        assert key_changes.known_keys(path) == left


def test_concurrent_adds_lose_no_key(path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: key_changes.add(path, f"user{number}", ["infer"], None), range(24)))

    assert len(KeyRing(path)) == 24
