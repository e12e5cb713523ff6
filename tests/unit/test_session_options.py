"""ONNX Runtime's options from a config: every parameter and accelerator of NVIDIA's backend."""

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import onnxruntime
import pytest

from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InvalidConfig
from nereid.vision.inference import session_options
from nereid.vision.inference.run_sizes import ThreadCounts
from nereid.vision.inference.session_options import BackendSettings, Sharing, providers, session_settings
from tests.tables import cases, rows

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
TENSORRT, OPENVINO = "TensorrtExecutionProvider", "OpenVINOExecutionProvider"
ALL = [TENSORRT, CUDA, OPENVINO, CPU]
SPINNING = "session.intra_op.allow_spinning"
SHRINKAGE = "memory.enable_memory_arena_shrinkage"
OURS = "--backend-config=onnxruntime,"
POOL = OURS + "enable-global-threadpool="
ONE_INSTANCE = [{"kind": "KIND_CPU", "count": 1}]
TWO_INSTANCES = [{"kind": "KIND_CPU", "count": 2}]


def config(parameters=None, kind="CPU", device_id=0, folder=Path("/r/m"), **document) -> ModelConfig:
    entries = {key: {"string_value": value} for key, value in (parameters or {}).items()}
    base = {"name": "m", "backend": "onnxruntime", "max_batch_size": 8, "instance_group": ONE_INSTANCE}
    return ModelConfig.from_document({**base, "parameters": entries, **document}, folder, 1, kind, device_id)


def accelerated(gpu=(), cpu=(), kind="GPU", **more) -> ModelConfig:
    """Build the config of an instance on GPU 3 with accelerators: (name, parameters) each."""
    lists = {"gpu_execution_accelerator": gpu, "cpu_execution_accelerator": cpu}

    def named(pairs) -> list[dict]:
        return [{"name": name, "parameters": parameters} for name, parameters in pairs]

    accelerators = {key: named(pairs) for key, pairs in lists.items() if pairs}
    return config(kind=kind, device_id=3, optimization={"execution_accelerators": accelerators}, **more)


def entry(settings: session_options.SessionSettings, key: str) -> str | None:
    try:
        if key == SHRINKAGE:
            return settings.run_options.get_run_config_entry(key)
        return settings.options.get_session_config_entry(key)
    except RuntimeError:
        return None


def unreadable(text: str, kind: str = "integral number") -> str:
    return f"failed to convert '{text}' to {kind}"


@rows((-1, "ORT_ENABLE_BASIC"), (0, "ORT_ENABLE_ALL"), (1, "ORT_ENABLE_EXTENDED"), (2, "ORT_DISABLE_ALL"))
def test_graph_level_is_tritons_numbering(level, expected):
    """Triton's levels are not ONNX Runtime's: 2 disables all."""
    options = session_settings(config(optimization={"graph": {"level": level}})).options

    assert options.graph_optimization_level == getattr(onnxruntime.GraphOptimizationLevel, expected)


def test_settings_without_any_parameter_are_onnx_runtimes_own():
    settings = session_settings(config({"intra_op_thread_count": "5"}))

    options, plain = settings.options, onnxruntime.SessionOptions()
    unset = ["graph_optimization_level", "execution_mode", "enable_cpu_mem_arena", "enable_mem_pattern"]
    assert [name for name in unset if getattr(options, name) != getattr(plain, name)] == []
    assert (entry(settings, SHRINKAGE), entry(settings, SPINNING)) == (None, None)
    assert (settings.providers, settings.threads) == (((CPU, {}),), ThreadCounts(5, 0))
    assert (settings.run_batch_size, settings.sharing) == (0, Sharing.OFF)


@pytest.mark.parametrize(("text", "expected"), [("0", "ORT_SEQUENTIAL"), ("1x", "ORT_PARALLEL")])
def test_execution_mode(text, expected):
    options = session_settings(config({"execution_mode": text})).options

    assert options.execution_mode == getattr(onnxruntime.ExecutionMode, expected)


@pytest.mark.parametrize("text", ["1", "TRUE", "on", "0", "Off"])
@rows(("enable_mem_arena", "enable_cpu_mem_arena"), ("enable_mem_pattern",) * 2)
def test_memory_switches(key, name, text):
    options = session_settings(config({key: text})).options

    switches = {"enable_cpu_mem_arena": True, "enable_mem_pattern": True}
    switches[name] = text.lower() in ("1", "true", "on")
    assert {switch: getattr(options, switch) for switch in switches} == switches


def test_some_runs_release_memory():
    settings = session_settings(config({"nereid.release_memory_every": "3"}))

    releases = [options is settings.releasing for options in islice(settings.options_of_runs(), 6)]
    assert releases == [False, False, True] * 2
    assert settings.releasing.get_run_config_entry(SHRINKAGE) == "cpu:0"
    plain = session_settings(config())
    assert {id(options) for options in islice(plain.options_of_runs(), 6)} == {id(plain.run_options)}


@cases(
    never=("0", {}, "CPU", ": expected a number of runs from 1 to 999999, got '0'"),
    without_an_arena=("9", {"enable_mem_arena": "0"}, "CPU", " contradicts enable_mem_arena"),
    beside_shrinkage=("9", {SHRINKAGE: "cpu:0"}, "CPU", " contradicts memory.enable_memory_arena"),
    memory_of_cuda_graphs=("9", {"nereid.cuda_graphs": "true"}, "GPU", " contradicts CUDA graphs"),
)
def test_release_without_effect_is_refused(every, others, kind, message, monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ALL)
    parameters = {"nereid.release_memory_every": every, **others}

    with pytest.raises(InvalidConfig, match=f"nereid.release_memory_every{message}"):
        session_settings(config(parameters, kind))


@cases(two=("2", 8, 2), none=("0", 8, 0), negative=("-1", 8, 0), without_batches=("2", 0, 0))
def test_run_batch_size(text, max_batch_size, expected):
    model = config({"nereid.run_batch_size": text}, max_batch_size=max_batch_size)

    assert session_settings(model).run_batch_size == expected


@cases(
    server=("CPU", {}, Sharing.TRIED),
    GPU=("GPU", {}, Sharing.OFF),
    required=("CPU", {"nereid.shared_weights": "true"}, Sharing.REQUIRED),
    declined=("CPU", {"nereid.shared_weights": "0"}, Sharing.OFF),
)
def test_instances_of_a_server_share_their_weights(kind, parameters, expected, monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    model = config(parameters, kind=kind)

    assert session_settings(model, BackendSettings.from_command_line(["tritonserver"])).sharing is expected
    assert (session_settings(model).sharing is Sharing.REQUIRED) == (expected is Sharing.REQUIRED)


@cases(
    one=(ONE_INSTANCE, None, None),
    two=(TWO_INSTANCES, None, "0"),
    two_by_default=([], None, "0"),
    two_says_the_caller=(ONE_INSTANCE, 2, "0"),
)
def test_instances_that_share_cores_do_not_spin(groups, instances, expected):
    """A waiting thread leaves the core to the others; the caller's instances count where they run it."""
    assert entry(session_settings(config(instance_group=groups), instances=instances), SPINNING) == expected
    assert session_settings(config(), instances=1000).threads == ThreadCounts(1, 0)


def test_session_options_are_passed_through_and_unknown_parameters_ignored():
    """Arena shrinkage belongs to the run's options, where ONNX Runtime reads it after each run."""
    known = {SPINNING: "1", "session.dynamic_block_base": "4", SHRINKAGE: "cpu:0;gpu:0"}
    unknown = {"sessions.none": "1", "share_session_between_instances": "perhaps", "log_level": "9", "": ""}

    settings = session_settings(config(known | unknown, instance_group=TWO_INSTANCES))

    assert entry(settings, SPINNING) == "1"
    assert entry(settings, "session.dynamic_block_base") == "4"
    assert entry(settings, "sessions.none") is None
    assert entry(settings, SHRINKAGE) == "cpu:0;gpu:0"
    assert settings.providers == ((CPU, {}),)


@cases(
    nothing=([], BackendSettings(4, frozenset(), {}, "")),
    default_batch_size=([OURS + "default-max-batch-size=16"], BackendSettings(16)),
    negative_default_batch_size=([OURS + "default-max-batch-size=-3"], BackendSettings(0)),
    op_libraries=(
        [OURS + "allowed-op-libraries=/a/lib.so::/b/../c.so"],
        BackendSettings(allowed_op_libraries=frozenset({Path("/a/lib.so"), Path("/c.so")})),
    ),
    global_thread_pool=(
        [POOL + "1", OURS + "intra_op_thread_count=3", OURS + "inter_op_thread_count=2"],
        BackendSettings(thread_counts={"intra_op_thread_count": "3", "inter_op_thread_count": "2"}),
    ),
    global_thread_pool_of_ONNX_Runtimes_size=(
        [POOL + "1"],
        BackendSettings(thread_counts={"intra_op_thread_count": "0", "inter_op_thread_count": "0"}),
    ),
    profile_apart=(["--model-config-name", "cpu"], BackendSettings(profile="cpu")),
)
def test_server_flags_become_settings(words, expected):
    settings = BackendSettings.from_command_line(["tritonserver", *words])

    assert settings == replace(expected, shares_weights=True)


def test_global_pool_replaces_the_models_own_threads():
    words = [POOL + "1", OURS + "intra_op_thread_count=3"]
    model = config({"intra_op_thread_count": "7", "inter_op_thread_count": "8"})

    settings = session_settings(model, BackendSettings.from_command_line(words))

    options = settings.options
    assert settings.threads == ThreadCounts(3, 0)
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 0)


@cases(("allowed", "printed"), none=([], "none"), others=(["/b.so", "/a.so"], "/a.so, /b.so"))
def test_op_library_that_is_not_allowed_is_never_loaded(allowed, printed):
    """A config alone cannot make the server run native code; the message says which flag may."""
    model = config(model_operations={"op_library_filename": ["/tmp/evil.so"]})
    backend = BackendSettings(allowed_op_libraries=frozenset(map(Path, allowed)))

    message = (
        f"model 'm', custom operators: expected a library of {printed}, got '/tmp/evil.so'; "
        "fix: start the server with --backend-config=onnxruntime,allowed-op-libraries=PATH[:PATH]"
    )
    with pytest.raises(InvalidConfig, match=f"^{re.escape(message)}$"):
        session_settings(model, backend)


def test_allowed_op_library_that_cannot_be_loaded_is_refused(tmp_path):
    model = config(model_operations={"op_library_filename": [str(tmp_path / "sub" / ".." / "lib.so")]})
    backend = BackendSettings(allowed_op_libraries=frozenset({tmp_path.resolve() / "lib.so"}))

    with pytest.raises(InvalidConfig, match=r"onnx runtime error 1: Failed to load library .*lib\.so"):
        session_settings(model, backend)


DEVICE = {"device_id": "3"}


@cases(
    ("model", "expected"),
    cpu=(config(), ()),
    gpu=(config(kind="GPU", device_id=3), ((CUDA, DEVICE),)),
    gpu_block_on_the_cpu=(accelerated(gpu=[("cuda", {}), ("unknown", {})], kind="CPU"), ()),
    **{
        f"{key} = {text}": (config({key: text}, "GPU", 3), ((CUDA, {key: option, **DEVICE}),))
        for key, text, option in [
            ("cudnn_conv_algo_search", "0", "EXHAUSTIVE"),
            ("cudnn_conv_algo_search", "2", "DEFAULT"),
            ("arena_extend_strategy", "1", "kSameAsRequested"),
            ("gpu_mem_limit", "1024", "1024"),
            ("do_copy_in_default_stream", "0", "0"),
        ]
    },
    cuda_graphs=(
        config({"nereid.cuda_graphs": "true"}, "GPU", 3),
        ((CUDA, {"enable_cuda_graph": "1", **DEVICE}),),
    ),
    cuda_graphs_on_the_cpu=(config({"nereid.cuda_graphs": "true"}), ()),
    cuda_block_over_deprecated_parameters=(
        accelerated(
            gpu=[("cuda", {"cudnn_conv_algo_search": "DEFAULT"})],
            parameters={"cudnn_conv_algo_search": "1", "gpu_mem_limit": "1024"},
        ),
        ((CUDA, {"cudnn_conv_algo_search": "DEFAULT", "gpu_mem_limit": "1024", **DEVICE}),),
    ),
    all_in_their_order=(
        accelerated(
            gpu=[("cuda", {"use_tf32": "0"}), ("tensorrt", {"precision_mode": "FP16"})],
            cpu=[("openvino", {})],
        ),
        (
            (TENSORRT, {"trt_fp16_enable": "1", **DEVICE}),
            (CUDA, {"use_tf32": "0", **DEVICE}),
            (OPENVINO, {"device_type": "CPU"}),
        ),
    ),
)
def test_providers_of_an_instance(model, expected):
    assert providers(model, ALL) == (*expected, (CPU, {}))


@rows(
    ({"precision_mode": "FP32"}, {}),
    ({"precision_mode": "FP16"}, {"trt_fp16_enable": "1"}),
    ({"precision_mode": "INT8"}, {"trt_int8_enable": "1"}),
    ({"max_workspace_size_bytes": "1024"}, {"trt_max_workspace_size": "1024"}),
    ({"int8_calibration_table_name": "t"}, {"trt_int8_calibration_table_name": "t"}),
    ({"int8_use_native_calibration_table": "1"}, {"trt_int8_use_native_calibration_table": "1"}),
    *(({name: "1"}, {name: "1"}) for name in ("trt_engine_cache_enable", "trt_cuda_graph_enable")),
    ids=lambda value: "-".join(map("=".join, value.items())),
)
def test_tensorrt_keys_get_their_own_names(options, expected):
    pairs = providers(accelerated(gpu=[("tensorrt", options)]), ALL)

    assert pairs == ((TENSORRT, {**expected, **DEVICE}), (CUDA, DEVICE), (CPU, {}))


UNKNOWN_TENSORRT = "unknown parameter '{}' is provided for TensorRT Execution Accelerator"
UNSUPPORTED = "unsupported cudnn_conv_algo_search value '3' is requested"
UNKNOWN = "unknown Execution Accelerator '{}' is requested"


def gpu_block(name: str, **parameters: str) -> ModelConfig:
    return accelerated(gpu=[(name, parameters)])


UNSIGNED = "unsigned long long integral number"
NO_BF16 = "unsupported precision mode 'BF16' is requested"
MODE = "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got 2 ."
NO_TENSORRT = f"model 'm' needs {TENSORRT} on GPU 3: this onnxruntime has only {CUDA}, {CPU}; fix: install "


@cases(
    execution_mode=(config({"execution_mode": "2"}), ALL, MODE),
    thread_count=(config({"inter_op_thread_count": ""}), ALL, unreadable("")),
    memory_arena=(config({"enable_mem_arena": "yes"}), ALL, unreadable("yes", "boolean")),
    run_batch_size=(config({"nereid.run_batch_size": "two"}), ALL, unreadable("two")),
    convolution_search=(config({"cudnn_conv_algo_search": "3"}, "GPU"), ALL, UNSUPPORTED),
    tensorrt_precision=(gpu_block("tensorrt", precision_mode="BF16"), ALL, NO_BF16),
    tensorrt_key=(gpu_block("tensorrt", trt_what="1"), ALL, UNKNOWN_TENSORRT.format("trt_what")),
    tensorrt_device=(gpu_block("tensorrt", device_id="0"), ALL, UNKNOWN_TENSORRT.format("device_id")),
    tensorrt_size=(gpu_block("tensorrt", max_workspace_size_bytes="big"), ALL, unreadable("big", UNSIGNED)),
    cuda_switch=(gpu_block("cuda", do_copy_in_default_stream="yes"), ALL, unreadable("yes", "boolean")),
    openvino_on_gpu=(gpu_block("openvino"), ALL, UNKNOWN.format("openvino")),
    without_tensorrt=(gpu_block("tensorrt"), [CUDA, CPU], NO_TENSORRT + "onnxruntime-gpu, or use KIND_CPU"),
    tensorrt_on_cpu=(accelerated(cpu=[("tensorrt", {})], kind="CPU"), ALL, UNKNOWN.format("tensorrt")),
    # NVIDIA's backend reports a missing OpenVINO as an unknown accelerator, too.
    without_openvino=(accelerated(cpu=[("openvino", {})], kind="CPU"), [CPU], UNKNOWN.format("openvino")),
)
def test_wrong_setting_has_the_official_message(model, available, message, monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)

    with pytest.raises(InvalidConfig, match=f"^{re.escape(message)}$"):
        session_settings(model)


@rows(
    ("default-max-batch-size=many", unreadable("many")),
    ("enable-global-threadpool=yes", unreadable("yes", "boolean")),
)
def test_wrong_flag_has_the_official_message(flag, message):
    with pytest.raises(InvalidConfig, match=f"^{re.escape(message)}$"):
        BackendSettings.from_command_line([OURS + flag])


@cases(kind_auto=("KIND_AUTO", "CPU"), kind_gpu=("KIND_GPU", "GPU"))
def test_gpu_that_triton_chose_may_be_a_cpu(named, kind, tmp_path):
    """Which file names a GPU, `requests_gpu` decides."""
    (tmp_path / "config.pbtxt").write_text(f'name: "m" instance_group {{ kind: {named} }}')
    model = config(kind="GPU", folder=tmp_path)

    assert session_options.on_available_provider(model, [CPU], "").device_kind == kind
    for same, available in ((model, [CUDA, CPU]), (config(), [CPU])):
        assert session_options.on_available_provider(same, available, "") is same
