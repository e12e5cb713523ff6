"""Rules of Triton for a config that a server applies before it loads the model, and what it completes.

Source: triton-inference-server/core r24.10, model_config_utils.cc and backend_model.cc; each rule was seen
with the real server (tests/e2e/test_config_verdicts.py).
"""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal

from nereid.base.config.instance_bounds import read_bounds
from nereid.base.config.model_config import read_config
from nereid.base.config.parameters import (
    ONNXRUNTIME_BOOLEANS,
    ONNXRUNTIME_PARAMETERS,
    SERVER_PARAMETERS,
    SESSION_PREFIX,
    parse_bool,
)
from nereid.base.errors import InvalidConfig
from nereid.base.task_registry import TASK_BY_BACKEND
from nereid.repository.instance_sizing import BACKENDS
from nereid.repository.repository_index import backend_of, parameters_of, served_versions
from nereid.vision.inference.run_sizes import thread_counts

# Backends by platform. Source: model_config.h, kTensorFlowGraphDefPlatform and following lines.
PLATFORMS = {
    "ensemble": "",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
    "tensorrt_plan": "tensorrt",
}
EMBEDDED_BACKENDS = ("ab_router", "fused", "onnxruntime", "preprocess", "python", *TASK_BY_BACKEND)
# Backends of NVIDIA's image, which the embedded server does not have.
_IMAGE_BACKENDS = "dali fil identity openvino pytorch repeat square tensorflow tensorrt tensorrtllm vllm"
IMAGE_BACKENDS = tuple(_IMAGE_BACKENDS.split())
SPACE = "the name has a space: Triton never ends the load of such a model on a Python-based backend"
Findings = Iterator[tuple[Literal["note", "fail"], str]]


def apply_rules(folder: Path, document: Mapping[str, Any]) -> Findings:
    """Yield a verdict and a text for each rule that a model's config breaks.

    Raises:
        InvalidConfig: the value of a parameter is invalid.
    """
    if _has_space(folder):
        yield "fail", SPACE
    yield from _backend(folder, document)
    backend = backend_of(folder, document)
    # A Python model may complete its config by its own code.
    is_completed = backend == "onnxruntime" or (backend == "python" and completes_config(folder))
    tensors = tensor_problems(document, is_completed)
    for text in (*_scheduling(document), *_instances(document), *_warm_up(document), *tensors):
        yield "fail", text
    if backend == "onnxruntime":
        yield from _unread_parameters(document)
        _check_values(parameters_of(document))
    read_bounds(document)


def _has_library(folder: Path, document: Mapping[str, Any]) -> bool:
    return bool(document.get("runtime")) or any(folder.rglob("libtriton_*.so"))


def _has_space(folder: Path) -> bool:
    return any(character.isspace() for character in folder.name)


def missing_python_file(folder: Path, document: Mapping[str, Any]) -> Path | None:
    """Return the first missing file of a Python model."""
    if document.get("backend") != "python":
        return None
    name = document.get("default_model_filename") or "model.py"
    versions = (folder / str(version) for version in served_versions(folder, document))
    return next((path / name for path in versions if path.is_dir() and not (path / name).exists()), None)


def fatal_problem(folder: Path, document: Mapping[str, Any]) -> str:
    """Return the problem that makes Triton 24.10 hang or crash when it loads a model; empty if none."""
    if _has_space(folder):
        return SPACE
    if path := missing_python_file(folder, document):
        return f"Python model file not found in '{path}'"
    return next(_large_warm_ups(document), "")


def _backend(folder: Path, document: Mapping[str, Any]) -> Findings:
    platform, backend = document.get("platform", ""), document.get("backend", "")
    has_steps = "ensemble_scheduling" in document
    if platform and platform not in PLATFORMS:
        yield "fail", f"platform: {_expected(platform, PLATFORMS)}"
    elif has_steps and platform != "ensemble":
        yield "fail", f'ensemble_scheduling: expected platform "ensemble", got "{platform}"'
    elif platform == "ensemble" and not has_steps:
        yield "fail", 'platform "ensemble": expected ensemble_scheduling, got none'
    if platform and backend and PLATFORMS.get(platform, backend) != backend:
        yield "fail", f'backend: expected "{PLATFORMS[platform]}" for platform "{platform}", got "{backend}"'
    elif backend in IMAGE_BACKENDS:
        yield "note", f"only NVIDIA's image has the backend '{backend}'; nereid serve cannot load the model"
    elif (
        backend and not has_steps and backend not in EMBEDDED_BACKENDS and not _has_library(folder, document)
    ):
        yield "fail", f"backend: {_expected(backend, (*EMBEDDED_BACKENDS, *IMAGE_BACKENDS))}"
    if path := missing_python_file(folder, document):
        yield "fail", f"Python model file not found in '{path}'"


def _scheduling(document: Mapping[str, Any]) -> Iterator[str]:
    limit = int(document.get("max_batch_size", 0))
    if limit < 0:
        yield f"max_batch_size: expected 0 or more, got {limit}"
    batching = document.get("dynamic_batching", {})
    for size in map(int, batching.get("preferred_batch_size", ())):
        if not 0 < size <= max(limit, 0):
            yield f"preferred_batch_size: expected 1 to {limit} (max_batch_size), got {size}"
    levels, default = (int(batching.get(key, 0)) for key in ("priority_levels", "default_priority_level"))
    for level in batching.get("priority_queue_policy", {}):
        if not 1 <= int(level) <= levels:
            yield f"priority_queue_policy: expected a level of 1 to {levels} (priority_levels), got {level}"
    if levels and not 1 <= default <= levels:
        yield f"default_priority_level: expected 1 to {levels} (priority_levels), got {default}"


def _instances(document: Mapping[str, Any]) -> Iterator[str]:
    if "ensemble_scheduling" in document and document.get("instance_group"):
        yield "instance_group: expected none for an ensemble"
    for group in document.get("instance_group", ()):
        if group.get("kind") == "KIND_CPU" and group.get("gpus"):
            yield f"instance_group: gpus {group['gpus']} contradict kind KIND_CPU"


def _large_warm_ups(document: Mapping[str, Any]) -> Iterator[str]:
    limit = int(document.get("max_batch_size", 0))
    for sample in document.get("model_warmup", ()):
        name, size = sample.get("name", ""), int(sample.get("batch_size", 0))
        if 0 < limit < size:
            yield f"model_warmup '{name}': expected a batch_size of at most {limit}, got {size}"


def _warm_up(document: Mapping[str, Any]) -> Iterator[str]:
    yield from _large_warm_ups(document)
    inputs = document.get("input", ())
    required = {tensor.get("name") for tensor in inputs if not tensor.get("optional")}
    for sample in document.get("model_warmup", ()):
        name = sample.get("name", "")
        provided = {*sample.get("inputs", {})}
        if inputs and (provided - {tensor.get("name") for tensor in inputs} or required - provided):
            expected, actual = (
                ", ".join(sorted(map(str, names))) or "none" for names in (required, provided)
            )
            yield f"model_warmup '{name}': expected the inputs {expected}, got {actual}"


def completes_config(folder: Path) -> bool:
    """Return whether the code of a Python model completes its config."""
    texts = (path.read_text(errors="replace") for path in folder.glob("[0-9]*/*.py"))
    return any("auto_complete_config" in text for text in texts)


def _check_values(parameters: Mapping[str, str]) -> None:
    thread_counts(parameters, 1)
    for name in ONNXRUNTIME_BOOLEANS & parameters.keys():
        parse_bool(parameters[name])


def _unread_parameters(document: Mapping[str, Any]) -> Findings:
    known = ONNXRUNTIME_PARAMETERS | SERVER_PARAMETERS
    for name in document.get("parameters", {}):
        if name not in known and not name.startswith(SESSION_PREFIX):
            yield (
                "note",
                f"the backend 'onnxruntime' does not read the parameter '{name}'{_nearest(name, known)}",
            )


def _expected(value: str, known: Collection[str]) -> str:
    return f"expected one of {', '.join(sorted(known))}, got '{value}'{_nearest(value, known)}"


def _nearest(name: str, known: Collection[str]) -> str:
    matches = difflib.get_close_matches(name, known, 1)
    return f"; the nearest name is '{matches[0]}'" if matches else ""


IMAGE_FORMATS, IMAGE_RANK = ("FORMAT_NHWC", "FORMAT_NCHW"), 3
VARIABLE = -1


def tensor_problems(document: Mapping[str, Any], is_completed: bool) -> Iterator[str]:
    """Yield a text for each input or output that Triton refuses.

    Args:
        is_completed: whether the backend adds missing datatypes and dims.
    """
    for side in ("input", "output"):
        for tensor in document.get(side, ()):
            name = f"{side} '{tensor.get('name', '')}'"
            if not tensor.get("name"):
                yield f"{side}: expected a name, got none"
            if not is_completed:
                for field in ("data_type", "dims"):
                    if not tensor.get(field):
                        yield f"{name}: expected {field}, got none"
            yield from (f"{name}: {problem}" for problem in _shape_problems(tensor))


def _shape_problems(tensor: Mapping[str, Any]) -> Iterator[str]:
    dims = [int(dim) for dim in tensor.get("dims", ())]
    if wrong := [dim for dim in dims if dim < 1 and dim != VARIABLE]:
        yield f"expected dims of 1 or more, or -1 for a variable size, got {wrong[0]}"
    if tensor.get("format") in IMAGE_FORMATS and dims and len(dims) != IMAGE_RANK:
        yield f"expected {IMAGE_RANK} dims for {tensor['format']}, got {len(dims)}"
    if "reshape" in tensor and dims:
        shape = [int(dim) for dim in tensor["reshape"].get("shape", ())]
        is_scalar = not shape and _elements(dims) == 1
        if _elements(shape) != _elements(dims) and not is_scalar:
            yield f"expected a reshape with as many elements as dims {dims}, got {shape}"


def _elements(shape: Sequence[int]) -> int:
    if not shape:
        return 0
    return VARIABLE if VARIABLE in shape else prod(shape)


# A class with a base, or from another module, may inherit `auto_complete_config`.
PLAIN_CLASS = re.compile(r"^class TritonPythonModel *(\( *(object)? *\))? *:", re.MULTILINE)


def are_complete(repository: Path, profile: str, models: Collection[str]) -> bool:
    """Return whether the configs of all models are complete.

    Triton 24.10 completes them in a process of each model, which takes at least a second: it waits that long
    to learn whether the process is healthy.
    """
    return not any(why_incomplete(repository / name, profile) for name in models)


def why_incomplete(folder: Path, profile: str) -> str:
    """Return why Triton may add something to a model's config, empty if it adds nothing."""
    try:
        document = read_config(folder, profile)
        missing = next((key for key in ("name", "input", "output") if not document.get(key)), "")
        return f"its config has no {missing}" if missing else _why_added_to(folder, document)
    except UnicodeDecodeError as error:
        return f"its model.py is expected in UTF-8: {error}"
    except (InvalidConfig, OSError) as error:
        return f"its files cannot be read: {error}"


def _why_added_to(folder: Path, document: Mapping[str, Any]) -> str:
    backend = document.get("backend")
    if backend in BACKENDS or document.get("platform") == "ensemble":
        return ""
    if backend == "python":
        codes = [path.read_text() for path in folder.glob("[0-9]*/model.py")]
        is_plain = bool(codes) and all(PLAIN_CLASS.search(code) for code in codes)
        return "" if is_plain and not completes_config(folder) else "its code may complete its config"
    return f"backend '{backend}' may complete its config" if backend else "its config has no backend"
