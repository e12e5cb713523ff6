"""Options of ONNX Runtime's TensorRT provider, from a config and from this backend's defaults.

Source of the names and messages: onnxruntime_backend r24.10, src/onnxruntime.cc. For what the defaults mean:
onnxruntime 1.26, docs/execution-providers/TensorRT-ExecutionProvider.md.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import onnxruntime

from nereid.base.config.model_config import ModelConfig, TensorSpec
from nereid.base.config.parameters import parse_bool, parse_int
from nereid.base.errors import InvalidConfig
from nereid.vision.inference import version_state
from nereid.vision.inference.run_sizes import max_run_rows

TENSORRT = "TensorrtExecutionProvider"
FOLDER = "engines"
# Triton's names mapped to ONNX Runtime's for TensorRT, where they differ.
NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
PRECISIONS = {"FP32": {}, "FP16": {"trt_fp16_enable": "1"}, "INT8": {"trt_int8_enable": "1"}}
_INTEGERS = """
    trt_max_partition_iterations trt_min_subgraph_size trt_dla_core trt_builder_optimization_level
    trt_auxiliary_streams trt_ep_context_embed_mode
"""
_BOOLEANS = """
    int8_use_native_calibration_table trt_dla_enable trt_engine_cache_enable trt_dump_subgraphs
    trt_force_sequential_engine_build trt_context_memory_sharing_enable trt_layer_norm_fp32_fallback
    trt_timing_cache_enable trt_force_timing_cache trt_detailed_build_log trt_build_heuristics_enable
    trt_sparsity_enable trt_cuda_graph_enable trt_dump_ep_context_model
"""
_TEXTS = """
    int8_calibration_table_name trt_engine_cache_path trt_engine_cache_prefix trt_timing_cache_path
    trt_tactic_sources trt_extra_plugin_lib_paths trt_profile_min_shapes trt_profile_max_shapes
    trt_profile_opt_shapes trt_ep_context_file_path
"""
INTEGERS, BOOLEANS, TEXTS = (frozenset(names.split()) for names in (_INTEGERS, _BOOLEANS, _TEXTS))


def options(config: ModelConfig, parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the provider's options for the parameters of an accelerator.

    Without profile shapes, one engine serves every batch size; see `_profile`.

    Raises:
        InvalidConfig: a parameter is unknown, or its value is invalid.
    """
    options = _profile(config, parameters)
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in PRECISIONS:
                raise InvalidConfig(f"unsupported precision mode '{value}' is requested")
            options |= PRECISIONS[value]
            continue
        if key in BOOLEANS:
            parse_bool(value)
        elif key == "max_workspace_size_bytes":
            parse_int(value, "unsigned long long integral number")
        elif key in INTEGERS:
            parse_int(value)
        elif key not in TEXTS:
            raise InvalidConfig(f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator")
        options[NAMES.get(key, key)] = value
    return options


def _profile(config: ModelConfig, parameters: Mapping[str, str]) -> dict[str, str]:
    """Return profile shapes from one row to the largest run.

    Empty if the config sets any, does not batch, or has variable dims. TensorRT then builds an engine at the
    first run, and again for each larger batch.
    """
    shapes = {f"trt_profile_{bound}_shapes" for bound in ("min", "opt", "max")}
    dims = [dim for tensor in config.inputs for dim in tensor.network_dims]
    is_known = bool(dims) and all(dim > 0 for dim in dims)
    if shapes & parameters.keys() or not config.max_batch_size or not is_known:
        return {}
    rows = {"min": 1, "opt": max_run_rows(config), "max": max_run_rows(config)}
    return {
        f"trt_profile_{bound}_shapes": ",".join(_shape(tensor, count) for tensor in config.inputs)
        for bound, count in rows.items()
    }


def _shape(tensor: TensorSpec, rows: int) -> str:
    return f"{tensor.name}:{'x'.join(map(str, (rows, *tensor.network_dims)))}"


def with_engine_cache(options: Mapping[str, str], config: ModelConfig, path: Path) -> dict[str, str]:
    """Return options that cache engines and timings next to the repository, and create the cache folder.

    The folder is specific to the version, its files, ONNX Runtime's version and the other options. Options
    from the config take precedence; if they disable the cache, they are returned unchanged.

    Args:
        path: the ONNX file.

    Raises:
        InvalidConfig: the folder cannot be written.
    """
    parts = (onnxruntime.__version__, *(f"{key}={options[key]}" for key in sorted(options)))
    parent = version_state.folder_of(config.folder, config.version, FOLDER)
    folder = parent / version_state.digest(path, *parts)
    defaults = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(folder),
    }
    if not parse_bool(options.get("trt_engine_cache_enable", "1")):
        return dict(options)
    try:
        version_state.remove_old(parent)
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
    except OSError as error:
        raise InvalidConfig(
            f"engine cache of TensorRT: expected a writable folder '{folder}': {error}; "
            "fix: set trt_engine_cache_enable to 0 in the accelerator"
        ) from None
    return {**defaults, **options}
