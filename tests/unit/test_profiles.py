"""The profile `tuned`: tunable models, and complete files."""

import json
import os
import shutil
from pathlib import Path

import pytest

from nereid.errors import OperationFailed, WrongUsage
from nereid.publish import pinned
from nereid.repository import check
from nereid.repository import layout as repository
from nereid.repository.pbtxt import parse
from nereid.tune.profiles import MARK, overwritten, tunable, value_of, with_settings, write
from nereid.tune.trial import copy_repository
from tests.conftest import ROOT

ABOUT = ["2026-11-22 10:00 UTC, a processor, 2 cores.", "+10 %."]


@pytest.fixture
def models(tmp_path):
    """A repository like ours."""
    return copy_repository(ROOT / "model_repository", tmp_path / "models")


def test_every_model_of_the_base_is_in_the_profile(models):
    """The tuned model has new settings, and every other model of the profile a copy with a header."""
    before = (models / "classify_v2" / "config.pbtxt").stat().st_mtime_ns
    os.utime(models / "classify_v2" / "config.pbtxt", ns=(before - 10, before - 10))

    done = write(
        models, tunable(models, "classify_v1", "cpu"), {"instances": 3}, "nereid tune classify_v1", ABOUT
    )

    assert done == ["classify_v1", "classify_v2"]
    lines = (models / "classify_v1" / "configs" / "tuned.pbtxt").read_text().splitlines()
    assert lines[:4] == ["# Written by `nereid tune classify_v1`.", *(f"# {line}" for line in ABOUT), ""]
    assert lines[4].startswith("# Variant v1 on a CPU:")
    served, base = (repository.configs(models, profile) for profile in ("tuned", "cpu"))
    assert served["classify_v1"]["instance_group"] == [{"count": 3, "kind": "KIND_CPU"}]
    assert {**served, "classify_v1": base["classify_v1"]} == base
    assert (models / "classify_v2" / "config.pbtxt").stat().st_mtime_ns > before
    assert not list(models.rglob(".*.pbtxt"))


def test_checked_repository_with_the_profile_is_fine(models):
    """`nereid check` looks at every profile, and nothing of this one would be refused."""
    write(models, tunable(models, "classify_v1", "cpu"), {"instances": 3}, "nereid tune", ABOUT)

    findings = check.check(models)

    assert [finding for finding in findings if "tuned" in finding.what and finding.verdict == "ok"]
    # Its weights are links, as in any copy of this kind; nothing is found that the original has not.
    assert {f for f in findings if f.verdict != "ok"} <= {*check.check(ROOT / "model_repository")}


def test_tuning_goes_on_from_the_profile(models):
    """With `--profile tuned` what was tuned before stays, and the header is the new one alone."""
    write(models, tunable(models, "classify_v1", "cpu"), {"instances": 3}, "nereid tune a", ABOUT)

    done = write(models, tunable(models, "classify_v2", "tuned"), {"instances": 1}, "nereid tune b", ABOUT)

    assert done == ["classify_v2"]
    served = repository.configs(models, "tuned")
    counts = {name: served[name]["instance_group"][0]["count"] for name in ("classify_v1", "classify_v2")}
    assert counts == {"classify_v1": 3, "classify_v2": 1}
    text = (models / "classify_v2" / "configs" / "tuned.pbtxt").read_text()
    assert (text.count(MARK), text.startswith("# Written by `nereid tune b`.\n")) == (1, True)


@pytest.mark.parametrize("after_head", ["\n\n", "\n"], ids=["as-written", "blank-line-deleted"])
def test_head_is_replaced_and_nothing_else(models, after_head):
    """With or without the blank line after the header, no entry of the config is lost."""
    tuned = models / "classify_v1" / "configs" / "tuned.pbtxt"
    write(models, tunable(models, "classify_v1", "cpu"), {"instances": 3}, "nereid tune a", ABOUT)
    before = parse(tuned.read_text())
    tuned.write_text(tuned.read_text().replace("\n\n", after_head, 1))

    write(models, tunable(models, "classify_v1", "tuned"), {}, "nereid tune b", ABOUT)

    assert parse(tuned.read_text()) == before
    assert tuned.read_text().count(MARK) == 1


def test_what_copies_would_replace_is_told(models):
    """Tuned configs of other models that copies would replace are reported."""
    write(models, tunable(models, "classify_v1", "cpu"), {"instances": 3}, "nereid tune a", ABOUT)

    assert overwritten(models, tunable(models, "classify_v2", "cpu")) == ["classify_v1"]
    assert overwritten(models, tunable(models, "classify_v1", "cpu")) == []
    assert overwritten(models, tunable(models, "classify_v2", "tuned")) == []


def test_model_of_no_profile_is_tuned_from_its_plain_config(models):
    """It is written in addition to the copies; a note tells that profile `cpu` does not load it."""
    network = tunable(models, "efficientnet_lite0", "cpu")

    done = write(models, network, {"intra_op_thread_count": 2}, "nereid tune", ABOUT)

    assert sorted(done) == ["classify_v1", "classify_v2", "efficientnet_lite0"]
    assert "does not load 'efficientnet_lite0': classify_v1, classify_v2 run it" in network.notes[0]
    served = repository.configs(models, "tuned")["efficientnet_lite0"]
    assert served["parameters"]["intra_op_thread_count"] == {"string_value": "2"}
    assert tunable(models, "efficientnet_lite0", "ensemble").notes == ()


@pytest.mark.parametrize(
    ("model", "profile", "reason"),
    [
        ("nosuch", "cpu", "has no model 'nosuch', it has: classify, classify_v1, classify_v2, "),
        ("classify", "cpu", "it is a route; fix: tune its variants: classify_v1, classify_v2"),
        ("classify_v1", "ensemble", "tune its steps: imagenet_preprocess, efficientnet_lite0"),
    ],
    ids=["unknown", "route", "ensemble"],
)
def test_what_cannot_be_tuned_is_refused(models, model, profile, reason):
    """The message names what can be."""
    with pytest.raises(WrongUsage, match=reason):
        tunable(models, model, profile)


def test_profile_of_somebody_else_is_left_alone(models):
    """A config of that name without our first line is refused before anything is measured."""
    path = models / "imagenet_preprocess" / "configs" / "tuned.pbtxt"
    path.write_text("# mine\n")

    with pytest.raises(OperationFailed, match="was not written by nereid tune; fix: rename that file"):
        tunable(models, "classify_v1", "cpu")


def test_version_published_since_can_be_tuned(models):
    """The profile that a publication copied belongs to `nereid tune`."""
    write(models, tunable(models, "classify_v1", "cpu"), {"instances": 3}, "nereid tune", ABOUT)
    (pin,) = (
        each for each in repository.pins(models, repository.configs(models)) if each.model == "classify_v1"
    )
    pinned.write_like(models / "classify_v1", pin, 2, models / "classify_v3")

    done = write(models, tunable(models, "classify_v3", "tuned"), {"instances": 1}, "nereid tune", ABOUT)

    assert done == ["classify_v3"]
    assert repository.configs(models, "tuned")["classify_v3"]["instance_group"][0]["count"] == 1
    assert overwritten(models, tunable(models, "classify_v1", "cpu")) == ["classify_v3"]


def test_copies_of_another_profile_do_not_stay(models):
    """A profile that starts from `cpu` has nothing of the one that started from `gpu`."""
    write(models, tunable(models, "efficientnet_lite0", "gpu"), {"instances": 2}, "nereid tune", ABOUT)

    write(models, tunable(models, "classify_v1", "cpu"), {"instances": 3}, "nereid tune", ABOUT)

    assert not (models / "imagenet_preprocess" / "configs" / "tuned.pbtxt").exists()
    assert (models / "efficientnet_lite0" / "configs" / "tuned.pbtxt").exists()


def test_nothing_is_left_of_a_write_that_fails(models, monkeypatch):
    """A disk that is full half way: no file of the profile is there, nor a part of one."""
    written = Path.write_text

    def full(path, *args):
        """Take one file."""
        if path.parent.parent.name == "classify_v2":
            raise OSError(28, "No space left on device")
        return written(path, *args)

    found = tunable(models, "classify_v1", "cpu")
    monkeypatch.setattr(Path, "write_text", full)

    with pytest.raises(OperationFailed, match=r"cannot write profile 'tuned': .*No space left"):
        write(models, found, {"instances": 3}, "nereid tune", ABOUT)

    assert not [*models.rglob("tuned.pbtxt"), *models.rglob(".tuned.pbtxt")]


def test_link_leads_to_the_same_from_the_copy(tmp_path):
    """Weights that are links into a store, as a repository's often are, relative ones too."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "model.onnx").write_bytes(b"weights")
    folder = tmp_path / "models" / "net" / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").symlink_to("../../../store/model.onnx")

    copy = copy_repository(tmp_path / "models", tmp_path / "else" / "where" / "copy")

    assert (copy / "net" / "1" / "model.onnx").read_bytes() == b"weights"


def test_changed_config_is_not_overwritten(models):
    """A search takes minutes; what was changed meanwhile has not been measured."""
    found = tunable(models, "classify_v1", "cpu")
    found.path.write_text(found.text.replace("count: 2", "count: 4"))

    with pytest.raises(OperationFailed, match="has changed during the search; fix: run nereid tune again"):
        write(models, found, {"instances": 3}, "nereid tune", ABOUT)

    assert not list(models.rglob("tuned.pbtxt"))


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", {"instances": 3}),
        ("instance_group { count: 2 kind: KIND_GPU }", {"instances": 1}),
        ("max_batch_size: 8", {"max_batch_size": 16}),
        ("dynamic_batching {}", {"preferred_batch_size": 4, "max_queue_delay_microseconds": 500}),
        (
            "dynamic_batching { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 9 }",
            {"preferred_batch_size": 0, "max_queue_delay_microseconds": 0},
        ),
        ("", {"preferred_batch_size": 0, "max_queue_delay_microseconds": 0}),
        ("", {"intra_op_thread_count": 2, "nereid.run_batch_size": 4}),
        ('parameters { key: "decode_threads" value { string_value: "2" } }', {"decode_threads": 0}),
    ],
    ids=["no-group", "gpu", "rows", "batcher", "no-preference", "new-batcher", "parameters", "taken-away"],
)
def test_setting_is_read_as_it_was_written(text, settings):
    """A written setting is read back, with any config before."""
    config = parse(with_settings(text, settings))

    assert {name: value_of(config, name) for name in settings} == settings


def test_copy_leaves_the_repository_alone(tmp_path):
    """Configs and routes are files of the copy's own, weights are not copied, nothing hidden goes along."""
    source = tmp_path / "models"
    (source / "net" / "1").mkdir(parents=True)
    (source / "net" / "config.pbtxt").write_text("before")
    (source / "r.route.json").write_text(json.dumps({}))
    (source / "net" / "1" / "model.onnx").write_bytes(b"weights")

    copy = copy_repository(source, tmp_path / "copy")
    (copy / "net" / "config.pbtxt").write_text("after")

    assert (source / "net" / "config.pbtxt").read_text() == "before"
    assert (copy / "net" / "1" / "model.onnx").samefile(source / "net" / "1" / "model.onnx")
    assert not (copy / "r.route.json").samefile(source / "r.route.json")
    shutil.rmtree(copy)
    assert (source / "net" / "1" / "model.onnx").read_bytes() == b"weights"
