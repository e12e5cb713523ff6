"""`nereid serve` of a repository with broken models: it serves the others, and reports the broken ones."""

import shutil
from pathlib import Path

import pytest

from nereid import Classifier
from nereid.base.assets import COFFEE
from nereid.models.publish.remove import reload
from nereid.repository.check import check
from nereid.server.model_control import ModelControl
from tests.networks import ONE_INSTANCE, identity, store, tensor
from tests.routes import wait_until
from tests.supervised import ANY_PORTS, nereid, serving, store_eyes

pytestmark = pytest.mark.slow
TENSORS = tensor("input", "x", "FP32", [4]) + tensor("output", "y", "FP32", [4])
RIGHT = f'backend: "onnxruntime" max_batch_size: 8 {TENSORS}{ONE_INSTANCE}'
WRONG = RIGHT.replace('"onnxruntime"', '"onnxrutime"')
WARM_UP = """model_warmup { name: "w" batch_size: 99
inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } } }"""
STEP = """ensemble_scheduling { step { model_name: "net" model_version: 1
input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }"""
ENSEMBLE = f'platform: "ensemble" max_batch_size: 8 {TENSORS}{STEP}'


@pytest.fixture
def repository(tmp_path) -> Path:
    """A repository with one good model, and three that Triton does not load, each for another reason."""
    store_eyes(tmp_path / "models", "eyes", 1)
    models = tmp_path / "models"
    store(models, "net", identity("FP32", ["N", 4]), WRONG)
    store(models, "whole", identity("FP32", ["N", 4]), ENSEMBLE)
    shutil.rmtree(store(models, "versionless", identity("FP32", ["N", 4]), RIGHT).parent)
    return models


def test_broken_models_do_not_keep_the_others_from_serving(repository, tmp_path):
    """They are named with Triton's reasons and are not supervised; after the repair they are loaded.

    Triton never ends a load without the Python file or with a space, and a large warm-up crashes it.
    """
    store_eyes(repository, "blind", 1)
    (path := repository / "blind" / "1" / "model.py").unlink()
    store(repository, "warm", identity("FP32", ["N", 4]), RIGHT + WARM_UP)
    store(repository, "two words", identity("FP32", ["N", 4]), RIGHT)

    with serving(repository, tmp_path / "run") as served:
        reasons = served.ports["not_served"]
        assert sorted(reasons) == ["blind", "net", "two words", "versionless", "warm", "whole"]
        assert "the name has a space" in reasons["two words"]
        assert reasons["blind"] == f"model 'blind': Python model file not found in '{path}'"
        assert reasons["warm"] == "model 'warm': model_warmup 'w': expected a batch_size of at most 8, got 99"
        assert "unable to find backend library for backend 'onnxrutime'" in reasons["net"]
        assert reasons["whole"].endswith("ensemble 'whole' depends on 'net' which has no loaded version.")
        assert "at least one version must be available" in reasons["versionless"]
        for name in reasons:
            warning = f"warning: '{name}' is not served: {reasons[name]}"
            assert served.log.count(warning) == 1
        wait_until(served.is_ready, "ready")
        with Classifier(f"127.0.0.1:{served.ports['grpc']}", model="eyes") as classifier:
            assert classifier.classify(COFFEE).labels[0].score == pytest.approx(2.0)

        (repository / "net" / "config.pbtxt").write_text(RIGHT)
        reload(repository, "net", served.server_info)
        reload(repository, "whole", served.server_info)

        model_control = ModelControl(served.server_info)
        assert model_control.is_ready("net", 1)
        assert model_control.is_ready("whole", 1)
        assert served.is_ready()
        assert served.metric("repairs_total") == served.metric("restarts_total") == 0


def test_repository_with_broken_models_only_is_not_served(repository, tmp_path):
    shutil.rmtree(repository / "eyes")

    done = nereid("serve", "--repository", str(repository), *ANY_PORTS, XDG_RUNTIME_DIR=str(tmp_path))

    assert (done.returncode, done.stdout) == (1, "")
    assert "model 'net': Invalid argument: unable to find backend" in done.stderr.splitlines()[-1]


def test_repository_without_any_config_is_served(tmp_path):
    models = tmp_path / "models"
    path = store(models, "net", identity("FP32", ["N", 4]), None)

    with serving(models, tmp_path / "run") as served:
        assert "not_served" not in served.ports
        assert ModelControl(served.server_info).is_ready("net", 1)
    assert [finding.found for finding in check(models) if finding.verdict == "fail"] == []
    path.unlink()
    done = nereid("serve", "--repository", str(models), *ANY_PORTS, XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "expected MODEL/config.pbtxt or MODEL/1/model.onnx" in " ".join(done.stderr.split())
