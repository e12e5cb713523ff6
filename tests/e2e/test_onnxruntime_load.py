"""Loading ONNX models into the real server: refusals in NVIDIA's words, and configs that are completed.

Each has one case; tests/unit/test_onnx_file.py and tests/unit/test_session_options.py have all.
"""

import re

import pytest
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from tests.networks import ONE_INSTANCE, connect, identity, serve, store, tensor
from tests.routes import wait_until

ROWS = identity("FP32", ["batch", 4])


@pytest.fixture(scope="module")
def log() -> list[str]:
    return []


@pytest.fixture(scope="module")
def server(tmp_path_factory, log):
    with serve(tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("run"), log=log.append) as running:
        yield running


def check_refused(server, log: list[str], name: str, message: str) -> None:
    """Load a stored model; client and log must have the reason, in the log as its first line."""
    with connect(server) as client, pytest.raises(InferenceServerException) as refused:
        client.load_model(name)

    pattern = rf"failed to load '{name}' version 1: (.*?)(\\n|\"?$)"
    assert message in refused.value.message()
    texts = wait_until(lambda: [hit[1] for line in [*log] if (hit := re.search(pattern, line))], "the log")
    assert message in texts[0].replace('\\"', '"')


def test_bad_config_is_refused_in_the_words_of_nvidia(server, log):
    """NVIDIA's backend prints the datatype of the wire behind TYPE_."""
    tensors = tensor("input", "x", "FP32", [4]) + tensor("output", "y", "FP32", [4])
    config = f"{ONE_INSTANCE}max_batch_size: 4\n{tensors}"
    store(server.options.repository, "datatype", identity("STRING", ["batch", 4]), config)
    said = "configuration expects datatype TYPE_FP32 for input 'x', model provides TYPE_BYTES"

    check_refused(server, log, "datatype", f"unable to load model 'datatype', {said}")


def test_network_that_cannot_be_read_is_named_by_its_path(server, log):
    """`model.onnx` is a folder without the file, or damaged, which ONNX Runtime says in its own words."""
    config = ONE_INSTANCE + 'backend: "onnxruntime"\n'
    missing, broken = (store(server.options.repository, name, ROWS, config) for name in ("missing", "broken"))
    broken.write_bytes(b"no protobuf")
    missing.unlink()
    missing.mkdir()

    check_refused(server, log, "broken", f"onnx runtime error 7: Load model from {broken} failed")
    check_refused(
        server, log, "missing", f"unable to find '{missing / 'model.onnx'}' for model instance 'missing'"
    )


def test_config_is_completed_from_the_network(server, log):
    store(server.options.repository, "bare", ROWS, None)
    with connect(server) as client:
        client.load_model("bare")
        config = client.get_model_config("bare").config

    described = [(entry.name, entry.data_type, list(entry.dims)) for entry in (*config.input, *config.output)]
    assert described == [(name, model_config_pb2.TYPE_FP32, [4]) for name in ("x", "y")]
    assert (config.max_batch_size, list(config.dynamic_batching.preferred_batch_size)) == (4, [4])
    message = "autofilled max_batch_size to 4 for model 'bare' since batching is supporrted but no "
    message += "max_batch_size is specified in model configuration. Must specify max_batch_size to "
    message += "utilize autofill with a larger max batch size"
    warnings = wait_until(lambda: [line for line in [*log] if message in line], "the warning")
    assert warnings[0].startswith("W")
