"""The profile `tuned`: tunable models, and complete files."""

import json
import os
import shutil
from pathlib import Path

import pytest

from nereid.base.errors import OperationFailed
from nereid.insight.tune.profiles import MARK, overwritten_models, tunable, value_of, with_settings, write
from nereid.insight.tune.trial import copy_repository
from nereid.repository import repository_index as repository
from nereid.repository.pbtxt import parse
from tests.conftest import ROOT
from tests.tables import cases

ABOUT = ["2026-11-22 10:00 UTC, a processor, 2 cores.", "+10 %."]
BATCHER = "dynamic_batching { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 9 }"


@pytest.fixture
def models(tmp_path):
    return copy_repository(ROOT / "model_repository", tmp_path / "models")


def tune(models: Path, name: str, base: str = "cpu", command: str = "nereid tune", **settings) -> list[str]:
    return write(models, tunable(models, name, base), settings, command, ABOUT)


def test_every_model_of_the_base_is_in_the_profile(models):
    before = (models / "classify_v2" / "config.pbtxt").stat().st_mtime_ns
    os.utime(models / "classify_v2" / "config.pbtxt", ns=(before - 10, before - 10))

    done = tune(models, "classify_v1", command="nereid tune classify_v1", instances=3)

    assert done == ["classify_v1", "classify_v2"]
    lines = (models / "classify_v1" / "configs" / "tuned.pbtxt").read_text().splitlines()
    assert lines[:4] == ["# Written by `nereid tune classify_v1`.", *(f"# {line}" for line in ABOUT), ""]
    assert lines[4].startswith("# Variant v1 on a CPU:")
    served, base = (repository.configs(models, profile) for profile in ("tuned", "cpu"))
    assert served["classify_v1"]["instance_group"] == [{"count": 3, "kind": "KIND_CPU"}]
    assert {**served, "classify_v1": base["classify_v1"]} == base
    assert (models / "classify_v2" / "config.pbtxt").stat().st_mtime_ns > before
    assert not list(models.rglob(".*.pbtxt"))


def test_tuning_continues_from_the_profile(models):
    tune(models, "classify_v1", command="nereid tune a", instances=3)

    assert tune(models, "classify_v2", "tuned", command="nereid tune b", instances=1) == ["classify_v2"]

    served = repository.configs(models, "tuned")
    counts = {name: served[name]["instance_group"][0]["count"] for name in ("classify_v1", "classify_v2")}
    assert counts == {"classify_v1": 3, "classify_v2": 1}
    text = (models / "classify_v2" / "configs" / "tuned.pbtxt").read_text()
    assert (text.count(MARK), text.startswith("# Written by `nereid tune b`.\n")) == (1, True)


@cases("after_head", as_written="\n\n", blank_line_deleted="\n")
def test_only_the_header_is_replaced(models, after_head):
    tuned = models / "classify_v1" / "configs" / "tuned.pbtxt"
    tune(models, "classify_v1", command="nereid tune a", instances=3)
    before = parse(tuned.read_text())
    tuned.write_text(tuned.read_text().replace("\n\n", after_head, 1))

    tune(models, "classify_v1", "tuned", command="nereid tune b")

    assert parse(tuned.read_text()) == before
    assert tuned.read_text().count(MARK) == 1


def test_replaced_settings_are_reported(models):
    tune(models, "classify_v1", command="nereid tune a", instances=3)

    assert overwritten_models(models, tunable(models, "classify_v2", "cpu")) == ["classify_v1"]
    assert overwritten_models(models, tunable(models, "classify_v1", "cpu")) == []
    assert overwritten_models(models, tunable(models, "classify_v2", "tuned")) == []


def test_model_outside_the_profile_is_tuned_from_its_plain_config(models):
    network = tunable(models, "efficientnet_lite0", "cpu")

    done = write(models, network, {"intra_op_thread_count": 2}, "nereid tune", ABOUT)

    assert sorted(done) == ["classify_v1", "classify_v2", "efficientnet_lite0"]
    assert "does not load 'efficientnet_lite0': classify_v1, classify_v2 run it" in network.notes[0]
    served = repository.configs(models, "tuned")["efficientnet_lite0"]
    assert served["parameters"]["intra_op_thread_count"] == {"string_value": "2"}
    assert tunable(models, "efficientnet_lite0", "ensemble").notes == ()


def test_profile_of_a_user_is_not_replaced(models):
    (models / "imagenet_preprocess" / "configs" / "tuned.pbtxt").write_text("# mine\n")

    with pytest.raises(OperationFailed, match="was not written by nereid tune; fix: rename that file"):
        tunable(models, "classify_v1", "cpu")


def test_copies_of_another_profile_do_not_stay(models):
    tune(models, "efficientnet_lite0", "gpu", instances=2)

    tune(models, "classify_v1", instances=3)

    assert not (models / "imagenet_preprocess" / "configs" / "tuned.pbtxt").exists()
    assert (models / "efficientnet_lite0" / "configs" / "tuned.pbtxt").exists()


def test_failed_write_leaves_no_file(models, monkeypatch):
    written = Path.write_text

    def full(path, *args):
        if path.parent.parent.name == "classify_v2":
            raise OSError(28, "No space left on device")
        return written(path, *args)

    target = tunable(models, "classify_v1", "cpu")
    monkeypatch.setattr(Path, "write_text", full)

    with pytest.raises(OperationFailed, match=r"cannot write profile 'tuned': .*No space left"):
        write(models, target, {"instances": 3}, "nereid tune", ABOUT)

    assert not [*models.rglob("tuned.pbtxt"), *models.rglob(".tuned.pbtxt")]


def test_changed_config_is_not_overwritten(models):
    """A config that changed during the search has not been measured."""
    target = tunable(models, "classify_v1", "cpu")
    target.path.write_text(target.text.replace("KIND_CPU }", "KIND_CPU count: 4 }"))

    with pytest.raises(OperationFailed, match="has changed during the search; fix: run nereid tune again"):
        write(models, target, {"instances": 3}, "nereid tune", ABOUT)

    assert not list(models.rglob("tuned.pbtxt"))


@cases(
    no_group=("", {"instances": 3}),
    GPU=("instance_group { count: 2 kind: KIND_GPU }", {"instances": 1}),
    rows=("max_batch_size: 8", {"max_batch_size": 16}),
    batcher=("dynamic_batching {}", {"preferred_batch_size": 4, "max_queue_delay_microseconds": 500}),
    no_preference=(BATCHER, {"preferred_batch_size": 0, "max_queue_delay_microseconds": 0}),
    new_batcher=("", {"preferred_batch_size": 0}),
    parameters=("", {"intra_op_thread_count": 2, "nereid.run_batch_size": 4}),
    taken_away=('parameters { key: "decode_threads" value { string_value: "2" } }', {"decode_threads": 0}),
)
def test_setting_is_read_as_it_was_written(text, settings):
    config = parse(with_settings(text, settings))

    assert {name: value_of(config, name) for name in settings} == settings
    has_batcher = "dynamic_batching" in text or "preferred_batch_size" in settings
    assert config.HasField("dynamic_batching") is has_batcher


def test_copy_does_not_change_the_repository(tmp_path):
    source, store = tmp_path / "models", tmp_path / "store"
    for folder in (source / "net" / "1", source / "linked" / "1", store):
        folder.mkdir(parents=True)
    (source / "net" / "config.pbtxt").write_text("before")
    (source / "r.route.json").write_text(json.dumps({}))
    for weights in (source / "net" / "1" / "model.onnx", store / "model.onnx"):
        weights.write_bytes(b"weights")
    (source / "linked" / "1" / "model.onnx").symlink_to("../../../store/model.onnx")

    copy = copy_repository(source, tmp_path / "else" / "where" / "copy")
    (copy / "net" / "config.pbtxt").write_text("after")

    assert (source / "net" / "config.pbtxt").read_text() == "before"
    assert (copy / "net" / "1" / "model.onnx").samefile(source / "net" / "1" / "model.onnx")
    assert (copy / "linked" / "1" / "model.onnx").samefile(store / "model.onnx")
    assert not (copy / "r.route.json").samefile(source / "r.route.json")
    shutil.rmtree(copy)
    assert (source / "net" / "1" / "model.onnx").read_bytes() == b"weights"
