"""Row and thread counts for network runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from nereid.base.config.model_config import ModelConfig
from nereid.base.config.parameters import parse_int
from nereid.base.errors import InvalidConfig
from nereid.base.processes import available_cores

RUN_BATCH_SIZE = "nereid.run_batch_size"
WARM_BATCH_SIZES = "nereid.warm_batch_sizes"


def run_batch_size(config: ModelConfig) -> int:
    """Return the maximum rows per run; 0 for no limit, and for a model without a batch dimension.

    Raises:
        InvalidConfig: the parameter is not a number.
    """
    limit = max(0, parse_int(config.parameters.get(RUN_BATCH_SIZE, "0")))
    return limit if config.max_batch_size else 0


def max_run_rows(config: ModelConfig) -> int:
    """Return the rows of the largest run; 1 for a model without a batch dimension."""
    limit = run_batch_size(config)
    return max(1, min(limit, config.max_batch_size) if limit else config.max_batch_size)


def warm_batch_sizes(config: ModelConfig, is_default: bool) -> list[int]:
    """Return the rows of each warm-up run at load, from the parameter, such as `1,2,4`; empty for none.

    Args:
        is_default: whether to default to every power of two below the largest run, and the largest run.

    Raises:
        InvalidConfig: a size is not a number from 1 to the rows of the largest run.
    """
    largest = max_run_rows(config)
    if WARM_BATCH_SIZES not in config.parameters:
        powers = [2**power for power in range(largest.bit_length()) if 2**power < largest]
        return [*powers, largest] if is_default else []
    text = config.parameters[WARM_BATCH_SIZES]
    numbers = [number.strip() for number in text.split(",") if number.strip()]
    if not all(number.isdecimal() and 1 <= int(number) <= largest for number in numbers):
        raise InvalidConfig(
            f"model '{config.name}', parameter {WARM_BATCH_SIZES}: expected numbers from 1 to {largest} "
            f"with commas, got '{text}'"
        )
    return [int(number) for number in numbers]


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
        kind: instance kind; with `GPU`, the CPU does little work, so ONNX Runtime chooses the threads.

    Raises:
        InvalidConfig: a count is not a number.
    """
    intra_op, inter_op = (max(0, parse_int(parameters.get(name, "0"))) for name in PARAMETERS)
    if not intra_op and kind != "GPU":
        intra_op = max(1, available_cores() // max(1, instances))
    return ThreadCounts(intra_op, inter_op)
