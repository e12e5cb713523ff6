"""The verdict of `nereid check` about a config is that of the real server, with good configs as controls."""

from pathlib import Path

import pytest

from nereid.repository.check import check
from nereid.server.model_control import ModelControl
from tests.networks import ONE_INSTANCE, identity, parameter, serve, store, tensor

pytestmark = pytest.mark.nightly(minutes=1)
KEEP_SERVING = ("--exit-on-error=false", "--strict-readiness=false")
ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(each, "x") for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each.as_numpy())]) for each in inputs]
"""
X, Y = tensor("input", "x", "FP32", [4]), tensor("output", "y", "FP32", [4])
PYTHON = f'backend: "python" max_batch_size: 8 {ONE_INSTANCE}'
BATCHED = f"{PYTHON}{X}{Y}"
ONNX = f'backend: "onnxruntime" max_batch_size: 8 {ONE_INSTANCE}'
ENSEMBLE = f'platform: "ensemble" max_batch_size: 8 {X}{Y}'
MAPS = 'input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }'
ENSEMBLE_OF_ECHO = (
    f'{ENSEMBLE} ensemble_scheduling {{ step {{ model_name: "echo" model_version: 1 {MAPS} }} }}'
)


def levels(text: str) -> str:
    return f"{BATCHED} dynamic_batching {{ priority_levels: 2 {text} }}"


def x(text: str) -> str:
    return f"{PYTHON} input {{ {text} }} {Y}"


NAMED = 'name: "x" data_type: TYPE_FP32'
GOOD = {
    "echo": BATCHED,
    "backend_from_file_name": f"max_batch_size: 8 {X}{Y}{ONE_INSTANCE}",
    "preferred_sizes": f"{BATCHED} dynamic_batching {{ preferred_batch_size: [ 4, 8 ] }}",
    "two_priorities": levels("default_priority_level: 2 priority_queue_policy { key: 2 value { } }"),
    "variable_size": x(f"{NAMED} dims: [ -1, 2 ]"),
    "image_format": x(f"{NAMED} format: FORMAT_NCHW dims: [ 3, 2, 2 ]"),
    "other_shape": x(f"{NAMED} dims: [ 4 ] reshape {{ shape: [ 2, 2 ] }}"),
    "ensemble": ENSEMBLE_OF_ECHO,
    "onnx_plain": f"{ONNX}{X}{Y}",
    "onnx_without_tensors": ONNX,
    "onnx_unknown_parameter": f"{ONNX}{X}{Y}" + parameter("intra_op_thread_cnt", "1"),
}
BAD = {
    "unknown_backend": f'backend: "onnxrutime" max_batch_size: 8 {X}{Y}',
    "unknown_platform": f'platform: "onnx" max_batch_size: 8 {X}{Y}',
    "preferred_above_maximum": f"{BATCHED} dynamic_batching {{ preferred_batch_size: [ 16 ] }}",
    "negative_maximum": f'backend: "python" max_batch_size: -1 {X}{Y}',
    "unknown_field": f'backend: "python" max_batchsize: 8 {X}{Y}',
    "another_name": f'name: "other" {BATCHED}',
    "missing_version": f"{BATCHED} version_policy {{ specific {{ versions: [ 7 ] }} }}",
    "no_latest_version": f"{BATCHED} version_policy {{ latest {{ num_versions: 0 }} }}",
    "cpu_with_gpus": f'backend: "python" {X}{Y} instance_group {{ kind: KIND_CPU count: 1 gpus: [ 0 ] }}',
    "default_level_too_high": levels("default_priority_level: 3"),
    "no_default_level": levels(""),
    "policy_of_no_level": levels("default_priority_level: 1 priority_queue_policy { key: 3 value { } }"),
    "no_name": x("data_type: TYPE_FP32 dims: [ 4 ]"),
    "no_datatype": x('name: "x" dims: [ 4 ]'),
    "no_dims": x(NAMED),
    "dim_zero": x(f"{NAMED} dims: [ 0 ]"),
    "format_of_one_dim": x(f"{NAMED} format: FORMAT_NCHW dims: [ 4 ]"),
    "reshape_of_another_size": x(f"{NAMED} dims: [ 4 ] reshape {{ shape: [ 3 ] }}"),
    "missing_labels": f"{PYTHON}{X}" + tensor("output", "y", "FP32", [4], 'label_filename: "no.txt"'),
    "ensemble_without_steps": f"{ENSEMBLE} ensemble_scheduling {{ }}",
    "ensemble_without_scheduling": ENSEMBLE,
    "ensemble_with_instances": ENSEMBLE_OF_ECHO + ONE_INSTANCE,
    "ensemble_of_another_backend": ENSEMBLE_OF_ECHO.replace('platform: "ensemble"', 'backend: "python"'),
    "ensemble_of_a_missing_model": ENSEMBLE_OF_ECHO.replace("echo", "nosuch"),
    "ensemble_of_a_missing_version": ENSEMBLE_OF_ECHO.replace("model_version: 1", "model_version: 9"),
    "ensemble_of_larger_batches": ENSEMBLE_OF_ECHO.replace("max_batch_size: 8", "max_batch_size: 16"),
    "onnx_another_platform": f'platform: "tensorflow_savedmodel" {ONNX}{X}{Y}',
    "onnx_without_datatypes": f'{ONNX} input {{ name: "x" }} output {{ name: "y" }}',
    "onnx_missing_file": f'{ONNX}{X}{Y} default_model_filename: "net.onnx"',
    "onnx_another_input": f"{ONNX}{tensor('input', 'z', 'FP32', [4])}{Y}",
    "onnx_parameter_value": f"{ONNX}{X}{Y}" + parameter("intra_op_thread_count", "two"),
    "onnx_flag_value": f"{ONNX}{X}{Y}" + parameter("enable_mem_arena", "maybe"),
}


def put(repository: Path, name: str, config: str) -> None:
    if name.startswith("onnx"):
        store(repository, name, identity("FP32", ["N", 4]), config)
        return
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    if not name.startswith("ensemble"):
        (repository / name / "1" / "model.py").write_text(ECHO)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """For each config, whether the server has loaded it, and the failures of the check."""
    repository, run = tmp_path_factory.mktemp("verdicts"), tmp_path_factory.mktemp("run")
    for name, config in (GOOD | BAD).items():
        put(repository, name, config)
    failures: dict[str, list[str]] = {name: [] for name in GOOD | BAD}
    for finding in check(repository):
        if finding.verdict == "fail":
            failures[finding.model].append(finding.found)
    with serve(repository, run, *KEEP_SERVING) as server:
        ready = ModelControl(server.info()).ready_versions()
    return {name: (name in ready, texts) for name, texts in failures.items()}


@pytest.mark.parametrize("name", GOOD | BAD)
def test_check_judges_as_the_server(verdicts, name):
    is_loaded, failures = verdicts[name]

    assert (is_loaded, failures != []) == ((True, False) if name in GOOD else (False, True)), failures
