"""Defaults of the TensorRT provider: one engine for all batch sizes, and a cache that follows the version."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InvalidConfig
from nereid.base.files import state_folder
from nereid.vision.inference import tensorrt, version_state
from tests.networks import identity, parameter, store, tensor, written
from tests.tables import cases

DIMS = tensor("input", "x", "FP32", [3, 4]) + tensor("input", "size", "INT64", [2])


def config(folder: Path, text: str) -> ModelConfig:
    store(folder, "net", identity("FP32", ["N", 3]), text)
    return ModelConfig.from_file(folder / "net", 1)


# Batches are divided before the network runs, so shapes larger than those of a run never occur.
@cases(batches=("", 16), runs=(parameter("nereid.run_batch_size", 4), 4))
def test_profile_spans_all_sizes_of_a_run(more, most, tmp_path):
    model = config(tmp_path, "max_batch_size: 16\n" + DIMS + more)

    rows = {"min": 1, "opt": most, "max": most}
    shapes = {f"trt_profile_{name}_shapes": f"x:{n}x3x4,size:{n}x2" for name, n in rows.items()}
    assert tensorrt.options(model, {"precision_mode": "FP16"}) == {"trt_fp16_enable": "1"} | shapes


@cases(
    given=("max_batch_size: 16\n" + DIMS, {"trt_profile_opt_shapes": "x:8x3x4"}),
    turned_off=("max_batch_size: 16\n" + DIMS, {"trt_profile_min_shapes": ""}),
    variable_dim=("max_batch_size: 8\n" + tensor("input", "x", "FP32", [-1]), {}),
    no_batches=("max_batch_size: 0\n" + DIMS, {}),
    no_inputs=("max_batch_size: 8\n", {}),
)
def test_profile_is_left_to_the_config_and_to_onnx_runtime(text, user_options, tmp_path):
    options = tensorrt.options(config(tmp_path, text), user_options)

    assert {key: shapes for key, shapes in options.items() if key.startswith("trt_profile_")} == user_options


class Cache:
    def __init__(self, folder: Path) -> None:
        self.config = config(folder, "max_batch_size: 16\n" + DIMS)
        self.path = folder / "net" / "1" / "model.onnx"

    def options(self, user_options: dict[str, str] | None = None) -> dict[str, str]:
        return tensorrt.with_engine_cache(user_options or {}, self.config, self.path)

    def folder(self, user_options: dict[str, str] | None = None) -> Path:
        return Path(self.options(user_options)["trt_engine_cache_path"])


def test_engines_are_kept_next_to_the_repository(tmp_path):
    options = Cache(tmp_path / "models").options()

    folder = Path(options["trt_engine_cache_path"])
    assert folder.parent == state_folder(tmp_path / "models") / "engines" / "net" / "1"
    assert folder.is_dir()
    assert options["trt_timing_cache_path"] == str(folder)
    assert options["trt_engine_cache_enable"] == options["trt_timing_cache_enable"] == "1"


def test_changed_network_never_gets_an_old_engine(tmp_path):
    """The folder depends on the files of the version, and on the options that shape an engine."""
    cache = Cache(tmp_path)
    first, same, other = cache.folder(), cache.folder(), cache.folder({"trt_fp16_enable": "1"})

    text = "(float[N,3] x) => (float[N,3] y) { y = Add(x, ones) }"
    store(tmp_path, "net", written(text, ones=np.ones(3, np.float32)), None)

    assert first == same
    assert len({first, other, cache.folder()}) == 3


def test_given_options_of_the_cache_stay(tmp_path):
    cache, user_options = Cache(tmp_path), {"trt_engine_cache_path": "/engines"}

    assert cache.options(user_options)["trt_engine_cache_path"] == "/engines"
    assert cache.options({"trt_engine_cache_enable": "0"}) == {"trt_engine_cache_enable": "0"}


def test_old_engines_are_removed(tmp_path):
    cache = Cache(tmp_path)
    then_s = time.time() - version_state.MAX_UNUSED_AGE_S - 60
    os.utime(cache.folder({"trt_fp16_enable": "1"}), (then_s, then_s))

    kept = cache.folder()

    assert [*kept.parent.iterdir()] == [kept]


def test_folder_that_cannot_be_written_is_named(tmp_path):
    cache = Cache(tmp_path)
    path = version_state.folder_of(tmp_path / "net", 1, tensorrt.FOLDER)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")

    with pytest.raises(InvalidConfig, match=r"expected a writable folder .*trt_engine_cache_enable to 0"):
        cache.options()
