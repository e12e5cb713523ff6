"""Route files: checks against the repository, and the watch of a changing file."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from nereid.backends.routing.route_file import RouteWatch, check_ready, path_of, read_table
from nereid.base import files
from nereid.base.config.model_config import ModelConfig
from nereid.base.serving_errors import InvalidConfig
from tests.routes import publish_config
from tests.tables import cases

ROUTE = {
    "variants": [
        {"name": "v1", "model": "net", "version": 1, "weight": 9},
        {"name": "v2", "model": "pinned", "version": 1, "weight": 1},
    ],
    "default": "v1",
    "salts": {"variants": "a", "shadows": "b"},
}
DARK = {"name": "dark", "model": "net", "version": 2, "percent": 1}
STEP = 'model_name: "net" model_version: 2 output_map { key: "y" value: "scores" }'
PINNED = f"ensemble_scheduling {{ step {{ {STEP} }} }}"


def write(route: dict) -> bytes:
    return json.dumps(route).encode()


@pytest.fixture
def config(tmp_path) -> ModelConfig:
    """A route in a repository of a network with two versions and a pinned ensemble."""
    for folder in ("r/1", "net/1", "net/2", "pinned/1"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "pinned" / "config.pbtxt").write_text(PINNED)
    (tmp_path / "r" / "config.pbtxt").write_text(
        'backend: "ab_router" output { name: "scores" } '
        'parameters { key: "route" value { string_value: "r.route.json" } }'
    )
    (tmp_path / "r.route.json").write_bytes(write(ROUTE))
    return ModelConfig.from_file(tmp_path / "r", 1)


@pytest.fixture
def ready() -> set[tuple[str, int]]:
    return {("net", 1), ("net", 2), ("pinned", 1)}


@pytest.fixture
def watch(config, ready) -> RouteWatch:
    return RouteWatch(config, lambda model, version: (model, version) in ready)


def first(**change) -> dict:
    return {"variants": [ROUTE["variants"][0] | change]}


@cases(
    ("change", "message"),
    model=(first(model="nope"), "names version 1 of 'nope', which is not there"),
    version=(first(version=7), "names version 7 of 'net', which is not there"),
    outside=(first(model="../net"), "names '../net', which is not a folder of the repository"),
    name=(first(model="x" * 300), "cannot read the models of the route: .*too long"),
    circle=(first(model="r"), "names 'r', which is a route itself"),
    shadow=({"shadows": [DARK | {"model": "nope"}]}, "'nope', which is not there"),
)
def test_models_of_a_route_must_exist(config, change, message):
    with pytest.raises(InvalidConfig, match=message):
        read_table(config, write(ROUTE | change))


X = 'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }'
NET = X + ' output { name: "scores" data_type: TYPE_FP32 dims: [ %s ] }'


@cases(
    ("text", "message"),
    any_size=(NET % -1, None),
    completed_by_Triton=("", None),
    size=(NET % 5, "names 'net' for 'scores': expected TYPE_FP32 \\[3\\], got TYPE_FP32 \\[5\\]"),
    rank=(NET % "3, 1", "for 'scores': expected TYPE_FP32 \\[3\\], got TYPE_FP32 \\[3, 1\\]"),
    datatype=(NET.replace("32", "16") % 3, "for 'x': expected TYPE_FP32 \\[4\\], got TYPE_FP16"),
    name=(NET.replace('"scores"', '"y"') % 3, "for 'scores': expected TYPE_FP32 \\[3\\], got none"),
)
def test_variants_tensors_must_be_those_of_the_route(tmp_path, text, message):
    for folder in ("r/1", "net/1"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "net" / "config.pbtxt").write_text(text)
    added = 'output { name: "variant" data_type: TYPE_STRING dims: [ 1 ] }'
    (tmp_path / "r" / "config.pbtxt").write_text(f'backend: "ab_router" {NET % 3} {added}')
    config = ModelConfig.from_file(tmp_path / "r", 1)
    route = write(ROUTE | {"variants": ROUTE["variants"][:1]})

    with pytest.raises(InvalidConfig, match=message) if message else nullcontext():
        read_table(config, route)


@cases(
    ("name", "is_allowed"),
    own_folder=("r/r.route.json", False),
    version_folder=("net/1/r.json", False),
    other_model=("./r/../net/r.json", False),
    next_to_the_models=("r.route.json", True),
    outside=("../routes/r.json", True),
    absolute=("/routes/r.json", True),
)
def test_file_lies_outside_the_models_folders(config, name, is_allowed):
    """Triton would reload the model when the route changes."""
    named = ModelConfig.from_document({"parameters": {"route": {"string_value": name}}}, config.folder, 1)
    rejection = pytest.raises(InvalidConfig, match="the route must lie outside model folders, got '")

    with nullcontext() if is_allowed else rejection:
        assert path_of(named) == config.folder.parent / name


def test_changed_file_is_returned_once(watch):
    os.utime(watch.path)
    assert watch.poll() is None
    files.replace(watch.path, write(ROUTE | {"generation": 1}))

    assert watch.poll().route.generation == watch.table.route.generation == 1
    assert watch.poll() is None


def test_swapped_link_is_read(config):
    """Kubernetes mounts a ConfigMap as links, and swaps the link to the folder."""
    path = path_of(config)
    path.unlink()
    publish_config(path, ROUTE)
    watch = RouteWatch(config, lambda model, version: True)

    publish_config(path, ROUTE | {"generation": 1})

    assert watch.poll().route.generation == 1


@cases(
    ("make", "message"),
    empty=(Path.touch, "Input data was truncated"),
    wrong=(
        lambda path: path.write_bytes(write(ROUTE | {"default": "v9"})),
        "default must be one of v1, v2, got 'v9'",
    ),
    gone=(lambda path: None, "cannot read '.*r.route.json': No such file or directory"),
    folder=(Path.mkdir, "Is a directory"),
    pipe=(os.mkfifo, "expected a regular file, got "),
    huge=(lambda path: path.write_bytes(b" " * 1_000_001), "expected at most 1,000,000 bytes, got more"),
    circle=(lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
)
def test_wrong_file_changes_nothing_and_is_reported_once(watch, make, message):
    """No file in place of the route file can block the server or fill its memory."""
    before = watch.table
    watch.path.unlink()
    make(watch.path)

    with pytest.raises(InvalidConfig, match=message):
        watch.poll()
    assert [watch.poll(), watch.poll()] == [None, None]
    assert watch.table is before

    watch.path.rmdir() if watch.path.is_dir() else watch.path.unlink(missing_ok=True)
    watch.path.write_bytes(write(ROUTE | {"generation": 5}))
    assert watch.poll().route.generation == 5
    watch.path.unlink()
    make(watch.path)
    with pytest.raises(InvalidConfig, match=message):
        watch.poll()


def test_route_is_used_once_its_version_is_ready(watch, ready):
    """A file may come before its model: each poll checks the version again."""
    ready.remove(("pinned", 1))
    watch.path.write_bytes(write(ROUTE | {"generation": 1}))

    with pytest.raises(InvalidConfig, match="'v2' names version 1 of 'pinned': not ready"):
        watch.poll()
    assert watch.poll() is None
    ready.add(("pinned", 1))

    assert watch.poll().route.generation == 1


def test_readiness_covers_variants_and_shadows(config):
    checked = []
    table = read_table(config, write(ROUTE | {"shadows": [DARK]}))

    check_ready(table.route, lambda model, version: checked.append((model, version)) or True)

    assert checked == [("net", 1), ("pinned", 1), ("net", 2)]


@cases(
    ("fields", "default", "is_rejected"),
    only_by_name=({"weight": 0}, "v1", False),
    weight=({"weight": 1}, "v1", True),
    headers=({"weight": 0, "headers": {"x-route-a": ["b"]}}, "v1", True),
    default=({"weight": 0}, "v2", True),
)
def test_variant_without_traffic_need_not_be_ready(config, fields, default, is_rejected):
    """A route can move its traffic away from a failed variant."""
    first, second = ROUTE["variants"]
    content = ROUTE | {"variants": [first | {"weight": 1}, second | fields], "default": default}
    route = read_table(config, write(content)).route
    rejection = pytest.raises(InvalidConfig, match=r"'v2' names version 1 of 'pinned': not ready")

    with rejection if is_rejected else nullcontext():
        check_ready(route, lambda model, version: model != "pinned")
