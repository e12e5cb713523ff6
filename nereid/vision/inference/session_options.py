"""ONNX Runtime options from a config.pbtxt, with the parameters and accelerators of NVIDIA's backend.

Source of NVIDIA's names, defaults and messages: onnxruntime_backend r24.10, src/onnxruntime.cc. As there,
unknown parameters are ignored. docs/backends.md lists the parameters for users.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import count
from pathlib import Path
from typing import Any

import onnxruntime

from nereid.base.config.model_config import ModelConfig
from nereid.base.config.parameters import SESSION_PREFIX, parse_bool, parse_int
from nereid.base.config.server_flags import backend_config_values, flag_values
from nereid.base.errors import InvalidConfig
from nereid.vision.inference import tensorrt
from nereid.vision.inference.run_failures import onnxruntime_error_text
from nereid.vision.inference.run_sizes import (
    PARAMETERS,
    ThreadCounts,
    run_batch_size,
    thread_counts,
    warm_batch_sizes,
)
from nereid.vision.inference.tensorrt import TENSORRT

# Triton numbers `optimization.graph.level` differently from ONNX Runtime.
GRAPH_LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
EXECUTION_MODES = {0: onnxruntime.ExecutionMode.ORT_SEQUENTIAL, 1: onnxruntime.ExecutionMode.ORT_PARALLEL}
CUDA, OPENVINO, CPU = (f"{name}ExecutionProvider" for name in ("CUDA", "OpenVINO", "CPU"))
CUDNN_CONV_ALGO_SEARCH = {0: "EXHAUSTIVE", 1: "HEURISTIC", 2: "DEFAULT"}
ARENA_EXTEND_STRATEGY = {0: "kNextPowerOfTwo", 1: "kSameAsRequested"}
ENABLE_CUDA_GRAPH, USER_STREAM = "enable_cuda_graph", "user_compute_stream"
# Part of ONNX Runtime's error for a network with nodes on the CPU or with control flow.
# Source: onnxruntime 1.31, core/session/inference_session.cc.
NO_CUDA_GRAPHS = "cannot use the graph capture feature"
CUDA_BOOLEANS = frozenset({"do_copy_in_default_stream", "use_ep_level_unified_stream"})
ARENA_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
ALLOW_SPINNING = "session.intra_op.allow_spinning"

# Our own parameters. NVIDIA's backend ignores them, as it does ONNX Runtime's session options.
CUDA_GRAPHS = "nereid.cuda_graphs"
HALVE_BATCHES = "nereid.halve_batch_if_out_of_memory"
RELEASE_EVERY = "nereid.release_memory_every"
SHARED_WEIGHTS = "nereid.shared_weights"

Provider = tuple[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """Settings from the server's command line: `--backend-config=onnxruntime,…` and the profile.

    `thread_counts` of a global pool replace the model's own: an instance is a process here, so either pool
    serves one session. With `shares_weights`, the instances share their weights where they can.
    """

    default_max_batch_size: int = 4
    allowed_op_libraries: frozenset[Path] = frozenset()
    thread_counts: Mapping[str, str] = field(default_factory=dict)
    profile: str = ""
    shares_weights: bool = False

    @classmethod
    def from_command_line(cls, argv: Sequence[str]) -> "BackendSettings":
        """Read the arguments of `server_command_line`.

        Raises:
            InvalidConfig: a value has the wrong type.
        """
        flags = backend_config_values(argv, "onnxruntime")
        has_global_pool = parse_bool(flags.get("enable-global-threadpool", "0"))
        libraries = flags.get("allowed-op-libraries", "")
        return cls(
            default_max_batch_size=max(0, parse_int(flags.get("default-max-batch-size", "4"))),
            allowed_op_libraries=frozenset(Path(path).resolve() for path in libraries.split(":") if path),
            thread_counts={name: flags.get(name, "0") for name in PARAMETERS} if has_global_pool else {},
            profile=["", *flag_values(argv, "--model-config-name")][-1],
            shares_weights=True,
        )


class Sharing(Enum):
    """Whether all instances map one file of weights; `TRIED` falls back to separate weights."""

    OFF = auto()
    TRIED = auto()
    REQUIRED = auto()


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Options of a session and of its runs.

    `run_batch_size` limits the rows of one run; 0 means no limit. `extras` are the session entries and
    operator libraries, which affect the optimized network as do the fields of `options`. Every
    `release_every`-th run (0: none) uses `releasing`, which releases the arena's free memory; it is None
    without an arena. `warm_batch_sizes` are the rows of each warm-up run at load.
    """

    options: onnxruntime.SessionOptions
    run_options: onnxruntime.RunOptions
    releasing: onnxruntime.RunOptions | None
    release_every: int
    providers: tuple[Provider, ...]
    threads: ThreadCounts
    run_batch_size: int
    halves_batches: bool
    warm_batch_sizes: tuple[int, ...]
    extras: tuple[str, ...]
    sharing: Sharing

    def options_of_runs(self) -> Iterator[onnxruntime.RunOptions]:
        """Yield the options of each run, endlessly."""
        for number in count(1):
            is_releasing = self.release_every and not number % self.release_every
            yield self.releasing if is_releasing and self.releasing else self.run_options


def session_settings(
    config: ModelConfig, backend: BackendSettings | None = None, instances: int | None = None, stream: int = 0
) -> SessionSettings:
    """Translate the parameters, optimization settings and custom operators of `config`.

    Args:
        instances: number of sessions that share the cores; default: the config's number of instances.
        stream: address of the CUDA stream for all runs; with 0, ONNX Runtime creates its own.

    Raises:
        InvalidConfig: a value is invalid, or ONNX Runtime does not support it or lacks a provider.
    """
    backend = backend or BackendSettings()
    instances = config.cpu_instances if instances is None else instances
    parameters = {**config.parameters, **backend.thread_counts}
    options, run_options = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
    level = int(config.document.get("optimization", {}).get("graph", {}).get("level", 0))
    options.graph_optimization_level = GRAPH_LEVELS.get(
        level, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    )
    options.execution_mode = _execution_mode(parameters)
    if "enable_mem_arena" in parameters:
        options.enable_cpu_mem_arena = parse_bool(parameters["enable_mem_arena"])
    if "enable_mem_pattern" in parameters:
        options.enable_mem_pattern = parse_bool(parameters["enable_mem_pattern"])
    if ARENA_SHRINKAGE in parameters:
        run_options.add_run_config_entry(ARENA_SHRINKAGE, parameters[ARENA_SHRINKAGE])
    threads = thread_counts(parameters, instances, config.device_kind)
    options.intra_op_num_threads, options.inter_op_num_threads = threads.intra_op, threads.inter_op
    if instances > 1:
        # A thread that spins while waiting occupies a core that other instances need.
        options.add_session_config_entry(ALLOW_SPINNING, "0")
    entries = {key: value for key, value in parameters.items() if key.startswith(SESSION_PREFIX)}
    libraries = _op_libraries(config, backend)
    try:
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        for library in libraries:
            options.register_custom_ops_library(library)
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        raise InvalidConfig(onnxruntime_error_text(error)) from None
    chosen = providers(config, onnxruntime.get_available_providers(), stream)
    releasing = _releasing(config, options)
    return SessionSettings(
        options=options,
        run_options=run_options,
        releasing=releasing,
        release_every=_release_every(config, has_arena=releasing is not None, providers=chosen),
        providers=chosen,
        threads=threads,
        extras=(*(f"{key}={value}" for key, value in sorted(entries.items())), *libraries),
        run_batch_size=run_batch_size(config),
        halves_batches=parse_bool(parameters.get(HALVE_BATCHES, "false")) and config.max_batch_size > 0,
        # A batch size's first run is slow if TensorRT plans or a CUDA graph is recorded.
        warm_batch_sizes=tuple(
            warm_batch_sizes(config, is_default=TENSORRT in dict(chosen) or uses_cuda_graphs(chosen))
        ),
        sharing=_sharing(config, backend),
    )


def providers(config: ModelConfig, available: Sequence[str], stream: int = 0) -> tuple[Provider, ...]:
    """Return an instance's execution providers in order of preference; the CPU provider is always last.

    Args:
        available: the providers in this build of ONNX Runtime.
        stream: as for `session_settings`.

    Raises:
        InvalidConfig: an accelerator or its value is unknown, or a provider is not available.
    """
    accelerators = config.document.get("optimization", {}).get("execution_accelerators", {})
    choices: list[Provider] = []
    if config.device_kind == "GPU":
        choices += _gpu_providers(config, accelerators.get("gpu_execution_accelerator", ()), stream)
    for accelerator in accelerators.get("cpu_execution_accelerator", ()):
        if accelerator["name"] != "openvino" or OPENVINO not in available:
            raise InvalidConfig(f"unknown Execution Accelerator '{accelerator['name']}' is requested")
        choices.append((OPENVINO, {"device_type": "CPU"}))
    for name, _ in choices:
        if name not in available:
            raise InvalidConfig(
                f"model '{config.name}' needs {name} on GPU {config.device_id}: this onnxruntime has only "
                f"{', '.join(available)}; fix: install onnxruntime-gpu, or use KIND_CPU"
            )
    return (*choices, (CPU, {}))


def uses_cuda_graphs(chosen: Sequence[Provider]) -> bool:
    """Return whether runs replay a recorded CUDA graph, which needs the buffers of its recording."""
    graphs = ((CUDA, ENABLE_CUDA_GRAPH), (TENSORRT, "trt_cuda_graph_enable"))
    return any(parse_bool(dict(chosen).get(name, {}).get(key, "0")) for name, key in graphs)


def on_available_provider(config: ModelConfig, available: Sequence[str], profile: str) -> ModelConfig:
    """Return `config`, moved to the CPU if Triton chose a GPU (KIND_AUTO) but ONNX Runtime lacks CUDA."""
    if config.device_kind != "GPU" or CUDA in available or config.requests_gpu(profile):
        return config
    groups = [{**group, "kind": "KIND_CPU"} for group in config.document.get("instance_group", ())]
    return replace(config, device_kind="CPU", document={**config.document, "instance_group": groups})


def _releasing(config: ModelConfig, options: onnxruntime.SessionOptions) -> onnxruntime.RunOptions | None:
    arena = f"gpu:{config.device_id}" if config.device_kind == "GPU" else "cpu:0"
    if config.device_kind != "GPU" and not options.enable_cpu_mem_arena:
        return None
    releasing = onnxruntime.RunOptions()
    releasing.add_run_config_entry(ARENA_SHRINKAGE, arena)
    return releasing


def _release_every(config: ModelConfig, has_arena: bool, providers: Sequence[Provider]) -> int:
    if RELEASE_EVERY not in config.parameters:
        return 0
    text, name = config.parameters[RELEASE_EVERY], f"model '{config.name}', {RELEASE_EVERY}"
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise InvalidConfig(f"{name}: expected a number of runs from 1 to 999999, got '{text}'")
    if not has_arena:
        raise InvalidConfig(f"{name} contradicts enable_mem_arena: no arena keeps memory")
    if ARENA_SHRINKAGE in config.parameters:
        raise InvalidConfig(f"{name} contradicts {ARENA_SHRINKAGE}, with which every run returns memory")
    if uses_cuda_graphs(providers):
        raise InvalidConfig(f"{name} contradicts CUDA graphs, whose memory must not move")
    return int(text)


def _sharing(config: ModelConfig, backend: BackendSettings) -> Sharing:
    if SHARED_WEIGHTS in config.parameters:
        return Sharing.REQUIRED if parse_bool(config.parameters[SHARED_WEIGHTS]) else Sharing.OFF
    return Sharing.TRIED if backend.shares_weights and config.device_kind != "GPU" else Sharing.OFF


def _execution_mode(parameters: Mapping[str, str]) -> onnxruntime.ExecutionMode:
    mode = parse_int(parameters.get("execution_mode", "0"))
    if mode not in EXECUTION_MODES:
        expected = "Expected values for  execution_mode are 0 or 1"
        raise InvalidConfig(f"Invalid configuration value provided. {expected} but got {mode} .")
    return EXECUTION_MODES[mode]


def _op_libraries(config: ModelConfig, backend: BackendSettings) -> list[str]:
    """Return the resolved paths of the operator libraries, so that the path checked is the path loaded."""
    paths = []
    for name in config.document.get("model_operations", {}).get("op_library_filename", ()):
        library = Path(name).resolve()
        if library not in backend.allowed_op_libraries:
            allowed = ", ".join(map(str, sorted(backend.allowed_op_libraries))) or "none"
            raise InvalidConfig(
                f"model '{config.name}', custom operators: expected a library of {allowed}, got '{name}'; "
                "fix: start the server with --backend-config=onnxruntime,allowed-op-libraries=PATH[:PATH]"
            )
        paths.append(str(library))
    return paths


def _gpu_providers(
    config: ModelConfig, accelerators: Sequence[Mapping[str, Any]], stream: int
) -> list[Provider]:
    choices: list[Provider] = []
    cuda = _deprecated_cuda_options(config.parameters)
    # Our own parameter, because NVIDIA's backend would replay a graph over buffers that have moved.
    if parse_bool(config.parameters.get(CUDA_GRAPHS, "false")):
        cuda[ENABLE_CUDA_GRAPH] = "1"
    device = {"device_id": str(config.device_id)}
    for accelerator in accelerators:
        parameters = accelerator.get("parameters", {})
        if accelerator["name"] == "tensorrt":
            choices.append((TENSORRT, tensorrt.options(config, parameters) | device))
        elif accelerator["name"] == "cuda":
            for key in CUDA_BOOLEANS & parameters.keys():
                parse_bool(parameters[key])
            # NVIDIA's backend lets the deprecated values win; here the more specific value does.
            cuda |= parameters
        else:
            raise InvalidConfig(f"unknown Execution Accelerator '{accelerator['name']}' is requested")
    user_stream = {USER_STREAM: str(stream)} if stream else {}
    return [*choices, (CUDA, cuda | device | user_stream)]


def _deprecated_cuda_options(parameters: Mapping[str, str]) -> dict[str, str]:
    options = {
        key: parameters[key] for key in ("gpu_mem_limit", "do_copy_in_default_stream") if key in parameters
    }
    for key, values in [
        ("cudnn_conv_algo_search", CUDNN_CONV_ALGO_SEARCH),
        ("arena_extend_strategy", ARENA_EXTEND_STRATEGY),
    ]:
        if key in parameters:
            number = parse_int(parameters[key])
            if number not in values:
                raise InvalidConfig(f"unsupported {key} value '{number}' is requested")
            options[key] = values[number]
    return options
