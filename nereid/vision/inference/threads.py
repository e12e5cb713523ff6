"""Numbers of threads of a network: by default the instances share the cores."""

from collections.abc import Mapping
from dataclasses import dataclass

from nereid.base.config.parameters import parse_int
from nereid.base.processes import available_cores

PARAMETERS = ("intra_op_thread_count", "inter_op_thread_count")


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Threads within and between operators; 0 leaves the choice to ONNX Runtime."""

    intra_op: int
    inter_op: int


def thread_counts(parameters: Mapping[str, str], instances: int, kind: str = "CPU") -> ThreadCounts:
    """Return the threads of one instance.

    Args:
        instances: number of instances that share the cores.
        kind: of the instance; on a GPU the CPU does little work, so the choice stays with ONNX Runtime.

    Raises:
        InvalidConfig: a count is not a number.
    """
    intra_op, inter_op = (max(0, parse_int(parameters.get(name, "0"))) for name in PARAMETERS)
    if not intra_op and kind != "GPU":
        intra_op = max(1, available_cores() // max(1, instances))
    return ThreadCounts(intra_op, inter_op)
