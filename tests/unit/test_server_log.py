"""Triton's log as an operator sees it, on lines that 24.10 wrote."""

import json

from nereid.server.server_log import MAX_REPETITIONS, PERIOD_S, ServerLog

NOISE = [
    'W1121 10:00:00.1 1 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"',
    'E1121 10:00:00.1 1 server.cc:241] "CudaDriverHelper has not been initialized."',
    "Error: Failed to initialize NVML",
    'W1121 10:00:00.1 1 metrics.cc:798] "DCGM unable to start: DCGM initialization error"',
]
LOADING = 'I1121 10:00:00.1 1 model_lifecycle.cc:472] "loading: classify:1"'
NO_FILE = (
    "E1121 10:00:00.1 1 model_lifecycle.cc:642] \"failed to load 'net' version 1: Internal: InvalidConfig: "
    "unable to find '/r/net/1/model.onnx' for model instance 'net'\\n\\nAt:\\n  session.py(47)\\n\""
)
PARSE = (
    "[libprotobuf ERROR text_format.cc:337] Error parsing text-format inference.ModelConfig: 4:14: "
    'Message type "inference.ModelConfig" has no field named "max_batchsize".'
)
POLL = (
    "E1121 10:00:00.1 1 model_repository_manager.cc:1460] \"Poll failed for model directory 'e': "
    'failed to read text proto from /r/e/config.pbtxt"'
)
END = "error: creating server: Internal - failed to load all models"


def read(*lines: str) -> tuple[ServerLog, list[str]]:
    shown: list[str] = []
    log = ServerLog(shown.append)
    for line in lines:
        log.add(line)
    return log, shown


def test_cuda_noise_is_folded_into_one_line():
    _, shown = read(NOISE[0], LOADING, *NOISE[1:])

    note = "no GPU: serving on the CPU (Triton's CUDA, NVML and DCGM warnings are left out)"
    assert shown == [note, LOADING]


def test_reason_names_the_field_of_a_broken_config():
    log, _ = read(PARSE, POLL, END)

    assert str(log.failure()) == (
        "model 'e': failed to read text proto from /r/e/config.pbtxt "
        '(4:14: Message type "inference.ModelConfig" has no field named "max_batchsize".)'
    )


def test_reason_without_a_failed_model_is_tritons_error():
    log, _ = read(LOADING, 'E1121 10:00:00.1 1 main.cc:1] "failed to start HTTP service: Unavailable"', END)

    assert str(log.failure()) == (
        "failed to start HTTP service: Unavailable; creating server: Internal - failed to load all models"
    )


def test_refused_load_names_the_model_and_its_reason():
    """Recorded from Triton 24.10."""
    log, _ = read(LOADING)
    reason = (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: RuntimeError: no weights"
    )
    body = json.dumps({"error": f"{reason}\n\nAt:\n  /r/m/1/model.py(3): initialize\n;\n"})

    assert str(log.refused_load("m", body)) == "model 'm': RuntimeError: no weights"
    assert log.failures.keys() == {"m"}


def test_each_failure_is_logged_once():
    """Triton repeats a failed load at four places; a later attempt is logged again."""
    reason = "unable to find '/r/net/1/model.onnx' for model instance 'net'"
    stub = (
        f'I1121 10:00:00.1 1 pb_stub.cc:366] "Failed to initialize Python stub: InvalidConfig: {reason}\\n"'
    )
    instance = f'E1121 10:00:00.1 1 backend_model.cc:692] "ERROR: Failed to create instance: {reason}\\n"'
    table = ["| net | 1 | READY |", f"| net | 2 | UNAVAILABLE: Internal: {reason} |", "|     |   | At: |"]
    final = [f"error: creating server: load failed: {reason}", "At:", "  session.py(47)", ";"]

    log, shown = read(stub, instance, NO_FILE, *table, *final, LOADING, NO_FILE)

    assert shown == [NO_FILE, table[0], LOADING, NO_FILE]
    assert str(log.failure()) == f"model 'net': {reason}"


def test_last_error_has_the_reasons_of_models_that_were_never_loaded():
    last = [
        "error: creating server: Invalid argument - load failed for model 'e': ensemble 'e' depends on 'net' "
        "which has no loaded version. Model 'net' loading failed with error: version 1 is at UNAVAILABLE "
        "state: Internal: oops;",
        "load failed for model 'old': at least one version must be available under the version policy of "
        "model 'old'",
        "load failed for model 'net': version 1 is at UNAVAILABLE state: Internal: oops;",
    ]

    log, shown = read(LOADING, *last)

    assert shown == [LOADING]
    assert log.failures == {
        "e": "model 'e': ensemble 'e' depends on 'net' which has no loaded version.",
        "old": "model 'old': at least one version must be available under the version policy of model 'old'",
        "net": "model 'net': oops",
    }


def test_silent_end_has_the_last_lines():
    log, _ = read(LOADING)

    assert str(log.failure()) == "tritonserver ended without an error message"
    assert log.failure().__notes__ == [LOADING]


def test_message_that_repeats_is_counted():
    """A server without free descriptors writes 100,000 lines per second; other lines still appear."""
    now = 0.0
    shown: list[str] = []
    log = ServerLog(shown.append, lambda: now)
    line = "[warn] Error from accept() call: Too many open files"

    for number in range(1000):
        log.add(line)
        log.add(f"I1121 10:00:00.{number} 1 server.cc:1] same message, other time")
    log.add(LOADING)
    now = PERIOD_S
    log.add(LOADING)

    assert shown.count(line) == MAX_REPETITIONS
    assert len(shown) == 2 * MAX_REPETITIONS + 4
    assert shown[-4:] == [
        LOADING,
        "980 more lines were left out: Error from accept() call: Too many open files",
        "980 more lines were left out: same message, other time",
        LOADING,
    ]


def test_reported_devices_are_taken_once():
    """Only a line that begins with the report counts, since other lines may contain text of a client."""
    report = "\"device failed: process 41 of 'net' version 1 must be replaced: CUDA failure 700\""
    forged = LOADING.replace("classify:1", "device failed: process 42 of 'net'")
    log, _ = read(f"E1121 10:00:00.1 1 tensors.py:94] {report}", forged)

    assert log.take_failed_devices() == {41}
    assert log.take_failed_devices() == set()
