"""The profile `gpu`: its configs fit the plain ones, their networks and the options."""

from pathlib import Path

import pytest

from nereid.base.config.model_config import ModelConfig, read_pbtxt
from nereid.repository.repository_index import served_versions
from nereid.vision.imaging.preprocess_settings import PreprocessSettings
from nereid.vision.inference.network_file import open_file, path_of
from nereid.vision.inference.session_options import CPU, CUDA, providers, session_settings
from nereid.vision.inference.signature import Signature, validate
from tests.conftest import ROOT

FILES = ROOT.glob("model_repository/*/configs/gpu.pbtxt")
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in FILES if '"fused"' not in path.read_text())
NETWORKS = [path for path in CONFIGS if 'backend: "onnxruntime"' in (ROOT / path).read_text()]
FUSED = ROOT / "model_repository" / "classify_v1" / "configs"
GIBIBYTE = 2**30
BATCHES = {"max_batch_size", "instance_group", "dynamic_batching"}


def config(relative: str, kind: str = "GPU") -> ModelConfig:
    path = ROOT / relative
    folder, document = path.parents[1], read_pbtxt(path)
    return ModelConfig.from_document(document, folder, served_versions(folder, document)[-1], kind)


def without(fields: set[str], path: Path) -> dict:
    return {key: value for key, value in read_pbtxt(path).items() if key not in fields}


def test_every_network_and_preprocessing_has_a_config_for_the_gpu():
    """A model without one would stay on the CPU in this profile, next to its idle GPU."""
    backends = ("onnxruntime", "preprocess")
    paths = ROOT.glob("model_repository/*/config.pbtxt")
    plain = {path.parent.name for path in paths if read_pbtxt(path).get("backend") in backends}

    assert {ROOT.joinpath(path).parents[1].name for path in CONFIGS} == plain
    assert len(NETWORKS) == 1


@pytest.mark.parametrize("relative", CONFIGS)
def test_only_batches_instances_and_options_differ_from_the_plain_config(relative):
    path = ROOT / relative
    differing = BATCHES | {"parameters", "optimization"}

    assert without(differing, path) == without(differing, path.parents[1] / "config.pbtxt")


@pytest.mark.parametrize("relative", NETWORKS)
def test_network_fits_its_config(relative):
    model_config = config(relative)
    on_cpu = session_settings(config(relative, kind="CPU"))
    validate(model_config, Signature.of(open_file(path_of(model_config), on_cpu)))

    ((name, options), *rest) = providers(model_config, [CUDA, CPU])

    assert (name, [provider for provider, _ in rest]) == (CUDA, [CPU])
    assert options["arena_extend_strategy"] == "kSameAsRequested"
    assert GIBIBYTE <= int(options["gpu_mem_limit"]) <= 4 * GIBIBYTE
    assert on_cpu.halves_batches


def test_one_process_has_the_steps_of_the_ensemble():
    assert without(BATCHES, FUSED / "gpu.pbtxt") == without(BATCHES, FUSED / "cpu.pbtxt")
    assert read_pbtxt(FUSED / "gpu.pbtxt")["instance_group"] == [{"kind": "KIND_GPU", "count": 2}]
    for step in ("imagenet_preprocess", "efficientnet_lite0"):
        configs = ROOT / "model_repository" / step / "configs"
        assert read_pbtxt(configs / "gpu_ensemble.pbtxt") == read_pbtxt(configs / "gpu.pbtxt")


def test_preprocessing_has_a_limit_of_memory():
    (relative,) = (path for path in CONFIGS if path not in NETWORKS)
    model_config = config(relative)

    tensor_bytes = model_config.max_batch_size * 3 * 224 * 224 * 4
    assert PreprocessSettings.from_config(model_config).gpu_memory_limit_bytes > 4 * tensor_bytes
