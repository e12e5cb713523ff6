"""Checks of a repository before its server starts."""

import hashlib
import shutil

import pytest

from nereid.base.assets import REPOSITORY
from nereid.server.command_line import ServerOptions
from nereid.server.start_checks import unservable_models

NETWORK = "efficientnet_lite0"


@pytest.fixture
def repository(tmp_path):
    ignored = shutil.ignore_patterns("*.onnx", ".*.nereid")
    models = shutil.copytree(REPOSITORY, tmp_path / "models", ignore=ignored)
    for number in "12":
        folder = models / NETWORK / number
        (folder / "model.onnx").write_text(number)
        digest = hashlib.sha256(number.encode()).hexdigest()
        (folder / "SHA256SUMS").write_text(f"{digest}  model.onnx\n")
    return models


def reasons(repository, profile: str) -> dict[str, str]:
    return unservable_models(ServerOptions(repository, profile))


def test_unchanged_versions_are_served(repository):
    (repository / NETWORK / "1" / "notes.txt").write_text("mine")
    (repository / NETWORK / "2" / "SHA256SUMS").unlink()
    (repository / NETWORK / "2" / "model.onnx").write_text("changed")

    assert reasons(repository, "cpu") == reasons(repository, "ensemble") == {}


@pytest.mark.parametrize(
    ("profile", "models"), [("cpu", {"classify_v1"}), ("ensemble", {"classify_v1", "classify_v2", NETWORK})]
)
@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "changed"])
def test_models_that_run_a_damaged_version_are_not_served(repository, profile, models, is_missing):
    path = repository / NETWORK / "1" / "model.onnx"
    path.write_text("3")
    if is_missing:
        path.unlink()

    found = reasons(repository, profile)

    assert {*found} == models
    damaged = (
        f"version 1 of '{NETWORK}' is damaged: 'model.onnx' {'is missing' if is_missing else 'has changed'}"
    )
    assert damaged in found["classify_v1"]
    assert found["classify_v1"].endswith("; fix: restore the file, or publish it as a new version")
    if profile == "ensemble":  # the network with both versions is one model of Triton
        assert found["classify_v2"] == f"model 'classify_v2': its step '{NETWORK}' is not served"
        assert damaged in found[NETWORK]


def test_invalid_bounds_of_instances_are_not_served(repository):
    path = repository / NETWORK / "config.pbtxt"
    text = path.read_text()
    bounds = 'parameters { key: "nereid.instances" value { string_value: "BOUNDS" } }\n'

    path.write_text(text + bounds.replace("BOUNDS", "1-4"))
    assert reasons(repository, "ensemble") == {}
    path.write_text(text + bounds.replace("BOUNDS", "many"))
    reason = reasons(repository, "ensemble")[NETWORK]
    assert reason.startswith(f"model '{NETWORK}': parameter 'nereid.instances': expected LOW-HIGH with 1 <= ")
    assert reason.endswith("got 'many'")


def test_unreadable_file_is_damage(repository):
    path = repository / NETWORK / "2" / "model.onnx"
    path.unlink()
    path.symlink_to("nowhere")

    assert [*reasons(repository, "cpu")] == ["classify_v2"]
    assert "cannot be read" in reasons(repository, "cpu")["classify_v2"]


def test_ensemble_of_an_ensemble_is_left_out_too(repository):
    """Triton would load the damaged version with either of them."""
    shutil.copytree(repository / "classify_v2", outer := repository / "outer")
    text = (outer / "config.pbtxt").read_text().replace("classify_v2", "outer")
    (outer / "config.pbtxt").write_text(text.replace(NETWORK, "classify_v2"))
    (repository / NETWORK / "1" / "model.onnx").unlink()

    found = reasons(repository, "ensemble")

    assert {*found} == {NETWORK, "classify_v1", "classify_v2", "outer"}
    assert found["outer"] == "model 'outer': its step 'classify_v2' is not served"
