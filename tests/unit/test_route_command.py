"""`nereid route` without a server: written files, rejections, output, and a complete history."""

import itertools
import json
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

from nereid.base.errors import InvalidConfig, OperationFailed, WrongUsage
from nereid.base.journal import user_name
from nereid.base.prometheus_text import MetricSamples
from nereid.cli import route as commands
from nereid.models.routes.change import (
    ServedRouteStatus,
    change,
    propose_weights,
    read_samples,
    read_served_status,
    served_status,
)
from nereid.models.routes.location import find_route, read_route_file
from nereid.server.model_control import ModelControl
from nereid.server.ports import Ports
from nereid.server.run_dir import ServerInfo
from tests.fake_server import FakeServer, killed_at, running
from tests.publishing import contents, unchanged
from tests.routes import store_router
from tests.tables import cases
from tests.tables import rows as table_rows

V1 = {"name": "v1", "model": "first", "version": 1, "weight": 90}
V2 = {"name": "v2", "model": "second", "version": 3, "weight": 10}
ROUTE = {"variants": [V1, V2], "default": "v1", "salts": {"variants": "salt", "shadows": "pepper"}}
FILE, HISTORY = "classify.route.json", "classify.route.history.jsonl"
SET, SET_FILE = ["set", "v1=1", "--offline"], ["set", "--file", "-", "--offline"]


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    for version in ("first/1", "second/3"):
        (folder / version).mkdir(parents=True)
    store_router(folder, "classify", ROUTE)
    return folder


@pytest.fixture
def nereid(nereid):
    return partial(nereid, "route")


def document(repository: Path) -> dict:
    return json.loads((repository / FILE).read_text())


def weights(repository: Path) -> list:
    return [variant["weight"] for variant in document(repository)["variants"]]


def notes(nereid) -> list[tuple]:
    return [(entry["generation"], entry["note"]) for entry in json.loads(nereid("history", "--json").stdout)]


def rows(shown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]


def test_show_prints_the_whole_route(nereid, repository):
    shadow = {"name": "dark", "model": "second", "version": 3, "percent": 2.5}
    variants = [V1, V2 | {"headers": {"x-route-tenant": ["acme", "[red]zoo"]}}]
    text = json.dumps(ROUTE | {"variants": variants, "shadows": [shadow], "generation": 7})
    path = repository / FILE
    path.write_text(text)

    assert json.loads(nereid("show", "--json").stdout) == {
        "route": "classify",
        "file": str(path),
        "sha256": sha256(path.read_bytes()).hexdigest(),
        "generation": 7,
        "status": "no server runs",
        "served_sha256": None,
        "shares": {"v1": 0.9, "v2": 0.1},
        "network_versions": {"v1": "1", "v2": "3", "dark": "3"},
        "breakers": {},
        "document": json.loads(text),
    }
    assert "x-route-tenant: acme, [red]zoo" in nereid("show").stdout


def test_weights_are_set_and_recorded(nereid, repository):
    done = nereid("set", "v2=30", "v1=69.5", "--offline")

    assert done.stdout == ("classify: generation 1, v1 69.849 %, v2 30.151 %, written without a server\n")
    expected = ROUTE | {"variants": [V1 | {"weight": 69.5}, V2 | {"weight": 30}], "generation": 1}
    assert (done.exit_code, document(repository)) == (0, expected)
    assert [entry["route"] for entry in json.loads(nereid("history", "--json").stdout)] == [expected, ROUTE]
    assert notes(nereid) == [(1, "set"), (0, "first seen")]
    written = json.loads((repository / HISTORY).read_text().splitlines()[-1])
    assert list(written) == ["time", "user", "generation", "sha256", "note", "route", "crc32"]
    assert written["sha256"] == sha256((repository / FILE).read_bytes()).hexdigest()
    assert written["user"] == user_name(os.getuid())


@pytest.mark.parametrize("source", ["file", "stdin"])
@cases("is_missing", there=False, missing=True)
def test_whole_route_is_set_with_any_generation(nereid, repository, tmp_path, source, is_missing):
    """Only a whole route can be set if the route's file is missing."""
    if is_missing:
        (repository / FILE).unlink()
        failed = nereid("set", "v1=1", "--offline")
        assert (failed.exit_code, "classify.route.json' is missing; fix: " in failed.stderr) == (1, True)
    new = ROUTE | {"variants": [V2], "default": "v2", "generation": 99}
    (tmp_path / "new.json").write_text(json.dumps(new))

    name = "-" if source == "stdin" else str(tmp_path / "new.json")
    done = nereid("set", "--file", name, "--offline", stdin=json.dumps(new))

    assert (done.exit_code, document(repository)) == (0, new | {"generation": 1})
    assert notes(nereid)[0] == (1, "set from file")


@pytest.mark.parametrize("words", [["set", "v1=90.0", "v2=1e1"], ["set", "--file", "-"], ["revert", "0"]])
def test_no_change_writes_nothing(nereid, repository, words):
    with unchanged(repository):
        done = nereid(*words, stdin=json.dumps(ROUTE | {"generation": 5}))

    assert done.exit_code == 0
    assert done.stdout == "classify: nothing to change, generation 0, v1 90 %, v2 10 %\n"


WRONG_USAGE = {
    "nothing": (["set"], "nothing to set: expected NAME=WEIGHT…, or a complete route with --file"),
    "both": (["diff", "v1=1", "--file", "-"], "expected either NAME=WEIGHT… or --file, got both"),
    "variant": (["set", "v3=1"], "unknown variant 'v3': expected one of v1, v2"),
    "not a number": (["set", "v1=nan"], "expected NAME=WEIGHT, such as v2=10, got 'v1=nan'"),
    "Python's digits": (["set", "v1=1_0"], "expected NAME=WEIGHT, such as v2=10, got 'v1=1_0'"),
    "twice": (["set", "v1=1", "v1=2"], "expected one weight for each variant, got two for 'v1'"),
    "no file": (["set", "--file", "/none"], "cannot read '/none': No such file or directory"),
    "header": (["explain", "--header", "x"], "expected --header NAME=VALUE, got 'x'"),
    "model": (["show", "--model", "../x"], "'{repository}' has no route '../x', it has: classify"),
    "repository": (["show", "--repository", "/no"], "'/no' is not a folder; fix: name a model repository"),
}
FAILURES = {
    "all 0": (["set", "v1=0", "v2=0", "--offline"], "one weight must be positive, got 0 for all"),
    "bytes": (SET_FILE, "stdin: JSON must be UTF-8"),
    "network": (["diff", "--file", "-"], "model 'classify' names version 3 of 'third', which is not there"),
    "no server": (["set", "v1=1"], "no server is running for '{repository}'; fix: nereid serve, or write"),
    "generation": (["revert", "4"], "cannot revert: the history has no generation 4, it has: 0"),
    "no other": (["revert"], "cannot revert '{repository}/" + FILE + "': its history has no other route"),
    "request": (
        ["explain", "--variant", "v9"],
        "invalid request: unknown x-variant 'v9': expected one of v1",
    ),
    "endless": (["set", "--file", "/dev/zero", "--offline"], "'/dev/zero': expected at most 1,000,000 bytes"),
}
STDIN = {"bytes": b'{"default": "\xff"}', "network": json.dumps(ROUTE).replace('"second"', '"third"')}
FAILED = {
    name: (code, words, STDIN.get(name, json.dumps(ROUTE)), message)
    for code, table in ((2, WRONG_USAGE), (1, FAILURES))
    for name, (words, message) in table.items()
}


@cases(("code", "words", "stdin", "message"), **FAILED)
def test_failure_is_one_line_and_changes_no_file(nereid, repository, code, words, stdin, message):
    with unchanged(repository):
        done = nereid(*words, stdin=stdin)

    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert done.stderr.startswith("error: " + message.format(repository=repository))


NO_HISTORY = f"'/proc/{HISTORY}': No such file or directory"


@cases(
    folder=(Path.mkdir, SET, "'{path}': Is a directory"),
    pipe=(os.mkfifo, ["show"], "'{path}': expected a regular file"),
    not_writable=(lambda path: path.symlink_to(f"/proc/{FILE}"), SET_FILE, NO_HISTORY),
)
def test_unusable_file_is_named(make, words, message, nereid, repository):
    """A file that cannot be read or written is an error in one line; none blocks the command."""
    path = repository / FILE
    path.unlink()
    make(path)

    done = nereid(*words, stdin=json.dumps(ROUTE))

    assert (done.exit_code, done.stderr) == (1, f"error: {message.format(path=path)}\n")


@cases("broken", cut=b"{", bytes=b"\xff\xfe", other=b'{"variants": []}', deep=b"[" * 100_000)
def test_broken_file_is_replaced_by_revert_and_kept(nereid, repository, broken):
    nereid("set", "v1=50", "--offline")
    (repository / FILE).write_bytes(broken)

    failed = nereid("set", "v1=1", "--offline")
    done = nereid("revert", "--offline")

    assert (failed.exit_code, "fix: correct it, or nereid route revert" in failed.stderr) == (1, True)
    assert (done.exit_code, weights(repository)) == (0, [50, 10])
    assert notes(nereid) == [(2, "revert to 1"), (1, "edited by hand"), (1, "set"), (0, "first seen")]
    kept = json.loads(nereid("history", "--json").stdout)[1]["route"]
    assert kept in (broken.decode(errors="replace"), {"variants": []})
    assert "invalid route" in nereid("history").stdout


def test_link_is_followed(nereid, repository, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "route.json"
    (repository / FILE).rename(target)
    (repository / FILE).symlink_to(target)

    nereid("set", "v1=1", "--offline")

    assert (repository / FILE).is_symlink()
    assert json.loads(target.read_text())["generation"] == 1
    assert sorted(path.name for path in target.parent.iterdir()) == ["route.history.jsonl", "route.json"]


@cases(
    twice_goes_there_and_back=(["v1=1", "v1=2"], [[], []], [2], "revert to 2"),
    to_a_generation_then_before=(["v1=1", "v1=2", "v1=3"], [["1"], []], [3], "revert to 3"),
    past_equal_ones=(["v1=1", "v1=2", "v1=1"], [[]], [2], "revert to 2"),
)
def test_revert_goes_to_the_newest_that_is_different(sets, reverts, expected, note, nereid, repository):
    for word in sets:
        nereid("set", word, "--offline")

    done = [nereid("revert", *words, "--offline") for words in reverts][-1]

    generation = len(sets) + len(reverts)
    assert (done.exit_code, weights(repository)[:1], notes(nereid)[0]) == (0, expected, (generation, note))
    assert document(repository)["generation"] == generation


def test_file_edited_by_hand_is_recorded_and_undone(nereid, repository):
    """A manual edit may repeat a generation; both routes stay in the history."""
    nereid("set", "v1=1", "--offline")
    first, second = document(repository)["variants"]
    edited = document(repository) | {"variants": [first | {"weight": 7}, second]}
    (repository / FILE).write_text(json.dumps(edited))
    assert notes(nereid) == [(1, "edited by hand"), (1, "set"), (0, "first seen")]

    nereid("revert", "1", "--offline")
    assert weights(repository) == [1, 10]
    assert notes(nereid)[:2] == [(2, "revert to 1"), (1, "edited by hand")]

    (repository / FILE).write_text(json.dumps(ROUTE))
    nereid("set", "v1=3", "--offline")
    assert [generation for generation, _ in notes(nereid)] == [3, 0, 2, 1, 1, 0]


def test_damaged_lines_of_the_history_are_skipped_and_named(nereid, repository):
    """Not even a damaged last one prevents a change."""
    for weight in (1, 2, 3):
        nereid("set", f"v1={weight}", "--offline")
    path = repository / HISTORY
    path.write_bytes(path.read_bytes().replace(b'"generation":2', b'"generation":5', 1) + b"\xff\n")
    note = f"note: damaged lines of '{path}' are ignored: 3; fix: remove them"

    assert notes(nereid) == [(3, "set"), (1, "set"), (0, "first seen")]
    assert [note in nereid(*words).stderr for words in (["history"], ["revert", "--offline"])] == [True] * 2
    assert (notes(nereid)[0], weights(repository)[0]) == ((4, "revert to 1"), 1)


def test_route_is_the_only_one_or_named(repository):
    (repository / "broken").mkdir()
    (repository / "broken" / "config.pbtxt").write_text("nonsense")
    assert find_route(repository).name == "classify"

    shutil.copytree(repository / "classify", repository / "another")
    several = r"several routes; fix: name one with --model: another, classify$"
    with pytest.raises(OperationFailed, match=several):
        find_route(repository)
    assert find_route(repository, "another").name == "another"

    for name in ("another", "classify"):
        shutil.rmtree(repository / name)
    none = r"has no route: expected a model with backend ab_router; .*nonsense"
    with pytest.raises(WrongUsage, match=none):
        find_route(repository)


def test_diff_prints_fields_and_moved_keys(nereid, repository):
    variants = [V2 | {"weight": 20}, V1 | {"weight": 80, "deadline_ms": 5}]
    new = ROUTE | {"variants": variants, "max_in_flight": 3}

    shown = nereid("diff", "--file", "-", stdin=json.dumps(new)).stdout

    assert rows(shown)[:3] == [
        ["variants", "v1, v2", "v2, v1"],
        ["variants[v1].weight", "90", "80"],
        ["variants[v1].deadline_ms", "10000", "5"],
    ]
    share, _, rest = shown.splitlines()[-1].partition(" ")
    assert rest == "% of sticky keys move: v1 → v2"
    # Of 10,000 keys a tenth moves, give or take four standard deviations of 0.3 %.
    assert float(share) == pytest.approx(10, abs=1.2)


def test_diff_without_arguments_looks_back(nereid):
    assert nereid("diff").stdout == "the history has no previous route\n"
    nereid("set", "v2=15", "--offline")

    assert rows(nereid("diff").stdout) == [["variants[v2].weight", "10", "15"]]
    assert nereid("diff", "v2=15").stdout == "no differences\n"


RULED = ROUTE | {
    "variants": [V1, V2 | {"headers": {"x-route-tenant": ["acme", "zoo"]}}],
    "shadows": [
        {"name": "all", "model": "first", "version": 1, "percent": 100},
        {"name": "some", "model": "second", "version": 3, "percent": 40},
    ],
}


BY_SCORE = "it has the highest score of all variants for key 'alice'."
BY_HEADER = "its header rule is met: x-route-tenant is one of acme, zoo."
BY_CHANCE = "Chance decides, by weight: v1 90 %, v2 10 %."


@cases(
    variant=(["--variant", "v2"], "v2", "the request names variant 'v2'."),
    version=(["--version", "3", "--key", "k"], "v2", "it is the first variant whose network has version 3."),
    header=(["--header", "X-Route-Tenant=zoo"], "v2", BY_HEADER),
    header_of_a_key=(["--header", "x-route-key=alice"], "v1", BY_SCORE),
    key=(["--key", "alice"], "v1", BY_SCORE),
    other_header=(["--header", "cookie=v2"], "", BY_CHANCE),
)
def test_choice_is_explained(words, variant, reason, nereid, repository):
    (repository / FILE).write_text(json.dumps(RULED))

    output = json.loads(nereid("explain", *words, "--json").stdout)

    why = f"{variant} serves because {reason}" if variant else reason
    assert (output["variant"], output["why"].startswith(why)) == (variant, True)
    assert nereid("explain", *words).stdout.startswith(output["why"])
    assert output["ignored"] == (["cookie"] if "cookie=v2" in words else [])
    assert output["shares"] == ({} if variant else {"v1": 0.9, "v2": 0.1})


def test_shadows_are_explained(nereid, repository):
    """A request is never mirrored to its own model; by its key always or never, else by chance."""
    (repository / FILE).write_text(json.dumps(RULED))

    def mirrored(*words: str) -> dict[str, float]:
        return json.loads(nereid("explain", *words, "--json").stdout)["mirrored"]

    assert mirrored() == {"all": 1.0, "some": 0.4}
    assert mirrored("--variant", "v1") == {"all": 0.0, "some": 0.4}
    assert mirrored("--variant", "v2") == {"all": 1.0, "some": 0.0}
    keys = [("--header", f"x-route-key=caller-{number}") for number in range(12)]
    by_key = [mirrored(*key) for key in keys]
    assert {chances["some"] for chances in by_key if chances["all"] == 0.0} == {0.0, 1.0}


def test_concurrent_writers_lose_nothing(nereid, repository):
    target = find_route(repository)
    with ThreadPoolExecutor(8) as pool:
        for number in range(1, 9):
            pool.submit(change, target, propose_weights({"v1": number}), None, is_offline=True)

    recorded = json.loads(nereid("history", "--json").stdout)
    assert [entry["generation"] for entry in recorded] == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert recorded[0]["route"] == document(repository)
    assert {entry["route"]["variants"][0]["weight"] for entry in recorded} == {*range(1, 9), 90}


def test_killed_writer_leaves_a_whole_file(nereid, repository):
    """After a kill before any change of a file, it is the old or the new one; both stay in the history."""
    target, seen = find_route(repository), []
    for number in itertools.count(1):
        target.path.write_text(json.dumps(ROUTE))
        target.history.path.unlink(missing_ok=True)
        with killed_at(number) as changes:
            change(target, propose_weights({"v1": 5}), None, is_offline=True)
        if len(changes) < number:
            break
        seen.append(weights(repository)[0])

        done = nereid("set", "v1=6", "--offline")

        recorded = json.loads(nereid("history", "--json").stdout)
        assert (done.exit_code, weights(repository)) == (0, [6, 10])
        kept = [entry["route"]["variants"][0]["weight"] for entry in recorded]
        assert kept == ([6, 90] if seen[-1] == 90 else [6, 5, 90]), number

    assert {*seen} == {90, 5}
    assert seen == sorted(seen, reverse=True)


class PagedServer(FakeServer):
    """Has both models, and one page: the route files in use, and the breaker of v2 by network version."""

    def __init__(self, repository: Path, *in_use: str, breakers: dict[int, int] | None = None) -> None:
        self.repository, self.loaded = repository, {"first": {1}, "second": {3}}
        served = 'nereid_route_served_since_seconds{{route="classify",model_instance="{0}",sha256="{0}"}} 1\n'
        state = 'nereid_route_breaker_state{{route="classify",variant="v2",version="{}"}} {}\n'
        lines = [*map(served.format, in_use), *(state.format(*pair) for pair in (breakers or {}).items())]
        self._page = "".join(lines)

    def page(self) -> str:
        return self._page


@cases(by_all=(["a"], "served"), by_one=(["a", "b"], "not served yet: the server uses SHA-256 b"))
def test_route_is_served_when_every_instance_has_it(in_use, status, repository):
    with running(PagedServer(repository, *in_use)) as server_info:
        assert served_status(server_info, "classify", "a")[0] == status


@table_rows(("v1", "first", 1), ("v2", "second", 3))
def test_change_needs_ready_models(name, model, version, repository):
    before, server = contents(repository), PagedServer(repository)
    del server.loaded[model]

    message = f"^'{name}' names version {version} of '{model}': not ready$"
    with running(server) as server_info, pytest.raises(InvalidConfig, match=message):
        change(find_route(repository), propose_weights({"v1": 30}), server_info)

    assert contents(repository) == before | {HISTORY: sha256(b"").hexdigest()}


@cases(
    not_taken=(True, "it is not served yet: the server uses SHA-256 0ff0ff0ff0ff; fix: see"),
    died=(False, "it is not confirmed: the server at 127.0.0.1:1 does not respond: "),
)
def test_change_that_is_not_served_is_a_failure(has_page, reason, repository):
    target = find_route(repository)

    with running(PagedServer(repository, "0ff" * 20)) as server_info:
        ports = server_info.ports if has_page else replace(server_info.ports, metrics=1)
        server_info = replace(server_info, ports=ports)
        with pytest.raises(OperationFailed) as error:
            change(target, propose_weights({"v1": 30}), server_info, wait_s=0.1)

    assert reason in str(error.value)
    assert "wrote generation 1 of '" in str(error.value)
    assert (weights(repository), len(target.history.read())) == ([30, 10], 2)


@cases(stalled=(True, "timed out", "Deadline Exceeded"), dead=(False, ".*refused", "failed to connect"))
def test_server_that_does_not_respond_is_an_error(listens, http, grpc):
    with socket.socket() as stalled:
        stalled.bind(("127.0.0.1", 0))
        if listens:
            stalled.listen()
        port = stalled.getsockname()[1]
        server_info = ServerInfo(1, "127.0.0.1", Ports(port, port, port), "", "", "")

        read, control = partial(read_samples, server_info, "r", 0.2), ModelControl(server_info, 0.2)
        for ask, reason in ((read, http), (partial(control.is_ready, "classify", 1), grpc)):
            with pytest.raises(OperationFailed, match=f"^the server at .*:{port} does not respond: {reason}"):
                ask()


def test_breaker_of_another_version_is_not_shown(repository, capsys):
    target = find_route(repository)

    with running(PagedServer(repository, "0ff" * 20, breakers={3: 2, 4: 0})) as server_info:
        commands.show_route(target, read_route_file(target), server_info, as_json=False)

    shown = capsys.readouterr().out
    assert [(row[0], row[-1]) for row in rows(shown)] == [("v1", "—"), ("v2", "open")]
    assert shown.endswith("not served yet: the server uses SHA-256 0ff0ff0ff0ff\n")


PAGE = """# HELP nereid_route_served_since_seconds SHA-256
# TYPE nereid_route_served_since_seconds gauge
nereid_route_served_since_seconds{model_instance="classify_0_0",route="classify",sha256="old"} 1700000000.5
nereid_route_served_since_seconds{model_instance="classify_0_0",route="classify",sha256="new"} 1.7000000009e9
nereid_route_served_since_seconds{model_instance="classify_0_1",route="classify",sha256="late"} 1500000000
nereid_route_served_since_seconds{model_instance="other_0_0",route="other",sha256="theirs"} 1800000000
nereid_route_breaker_state{model_instance="classify_0_0",route="classify",variant="v1",version="1"} 0
nereid_route_breaker_state{model_instance="classify_0_0",route="classify",variant="v2",version="3"} 2
nereid_route_breaker_state{model_instance="classify_0_1",route="classify",variant="v2",version="3"} 1
nereid_route_breaker_state{model_instance="classify_0_0",route="classify",variant="v2",version="4"} 1
nereid_route_breaker_state{model_instance="other_0_0",route="other",variant="v1",version="1"} 1
nv_inference_count{model="first",version="1"} 5
"""


def test_metrics_page_is_read_for_one_route():
    """The newest file of each instance and the worst breaker count; other routes have no effect."""
    breakers = {("v1", "1"): "closed", ("v2", "3"): "open", ("v2", "4"): "half-open"}

    assert read_served_status(MetricSamples.parse(PAGE), "classify") == ServedRouteStatus(
        frozenset({"new", "late"}), breakers
    )
    assert read_served_status(MetricSamples.parse(PAGE), "none") == ServedRouteStatus(frozenset(), {})
