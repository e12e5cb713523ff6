"""The examiner process: open a network, run it, and report the findings.

It reads one JSON request from stdin. It writes JSON lines to stdout: `{"progress": …}` for each step, then
one of `report`, `rejected` and `failed`.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict

from nereid.config.model_config import ModelConfig
from nereid.errors import OperationFailed
from nereid.processes import PR_SET_PDEATHSIG, available_bytes
from nereid.publish.examination.examine import ExaminationRequest, Rejected, Report
from nereid.publish.examination.file_checks import (
    Progress,
    check_file,
    check_labels,
    check_signature,
    notes_of_config,
    served_config,
)
from nereid.publish.examination.half_range import check_half_range
from nereid.publish.examination.measurements import (
    Network,
    check_headroom,
    check_latency,
    check_memory,
    measure_memory,
)
from nereid.publish.examination.outputs import answers_of, check_outputs
from nereid.publish.examination.survey import survey
from nereid.repository import onnx_file
from nereid.repository.labels import InvalidLabels
from nereid.repository.onnx_file import InvalidOnnx
from nereid.serving_errors import InvalidConfig

NICENESS = 19
UNEXPECTED = "the examination failed unexpectedly"


def examine(request: ExaminationRequest, progress: Progress) -> Report:
    """Examine a network step by step.

    Raises:
        Rejected, InvalidOnnx, InvalidConfig: the network must not be served.
    """
    file, external_bytes = check_file(request, progress)
    progress("comparing its inputs and outputs with the current version")
    if request.current:
        path = onnx_file.network_path(request.current, request.document)
        check_signature(onnx_file.read(path).signature, file.signature)
    notes = list(notes_of_config(request, file))
    progress("opening it with its config")
    config = served_config(request, file.signature)
    identity = (file.sha256, file.size_bytes + external_bytes, file.opset, file.ir_version)
    del file  # so that its weights are not counted as the network's memory
    return measure(request, config, identity, notes, progress)


def measure(
    request: ExaminationRequest,
    config: ModelConfig,
    identity: tuple[str, int, int, int],
    notes: list[str],
    progress: Progress,
) -> Report:
    """Run the network and measure it; the report begins with `identity`.

    Raises:
        Rejected, InvalidConfig: the network must not be served.
    """
    # A first session and run, so that libraries and thread pools do not count as the network's memory.
    network = Network("the network", config, request.candidate)
    check_labels(request.labels, config)
    progress("preparing inputs")
    answers = answers_of(request)
    samples = answers.samples(config)
    network.run(samples[0])
    del network
    progress("measuring its memory")
    available = available_bytes()
    current, current_bytes = None, 0
    if request.current:
        current, current_bytes = measure_memory("the current version", config, request.current, samples[0])
    network, memory_bytes = measure_memory("the network", config, request.candidate, samples[0])
    progress(f"comparing outputs on {len(samples)} inputs")
    difference = check_outputs(request.gates, answers, network, current, samples, notes)
    if not request.gates.is_change_accepted:
        check_half_range(onnx_file.network_path(request.candidate, request.document), samples)
    progress("measuring its latency")
    latency_ms, slowdown = check_latency(network, current, samples[0], request.gates.max_slowdown)
    max_ratio = request.gates.max_memory_ratio
    ratio = check_memory(memory_bytes, current_bytes, max_ratio) if current else None
    check_headroom(memory_bytes, max(1, config.cpu_instances), available)
    unique_notes = tuple(dict.fromkeys(notes))
    return Report(*identity, latency_ms, slowdown, memory_bytes, ratio, difference, unique_notes)


def main(parent: int) -> None:
    """Examine the network of the request on stdin.

    Args:
        parent: process id of the command; this process ends with it.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the command has already ended
        return
    os.nice(NICENESS)
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)  # output of libraries must not reach the results

        def write(kind: str, content: object) -> None:
            with contextlib.suppress(BrokenPipeError):
                out.write(json.dumps({kind: content}) + "\n")

        answer(ExaminationRequest.from_json(sys.stdin.read()), write)


def answer(request: ExaminationRequest, write: Callable[[str, object], None]) -> None:
    """Examine or survey a network, and write the steps and the result by their kinds."""
    try:
        run = survey if request.is_survey else examine
        write("report", asdict(run(request, lambda line: write("progress", line))))
    except (Rejected, InvalidOnnx, InvalidLabels, InvalidConfig) as error:
        write("rejected", _line(error))
    except (OperationFailed, ImportError) as error:  # such as a missing package
        write("failed", str(error))
    except Exception as error:  # only the network differs between examinations
        write("rejected", f"{UNEXPECTED}: {type(error).__name__}: {_line(error)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    main(int(sys.argv[1]))
