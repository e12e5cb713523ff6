"""Opening of the device's side of a `fused` model on a GPU."""

from collections.abc import Sequence
from typing import Any

from nereid.backends.triton.overlap.lanes import Lanes
from nereid.base.config.model_config import ModelConfig
from nereid.base.config.parameters import parse_bool
from nereid.base.serving_errors import InvalidConfig
from nereid.vision.inference.run_sizes import WARM_BATCH_SIZES, max_run_rows
from nereid.vision.inference.session import Session
from nereid.vision.inference.session_options import ARENA_SHRINKAGE, CUDA_GRAPHS

# Parameters of runs that are not over fixed memory, or not of all sizes.
NEED_OWN_RUNS = frozenset({ARENA_SHRINKAGE, WARM_BATCH_SIZES})


def can_bind(
    config: ModelConfig, preprocess: ModelConfig, network: ModelConfig, wanted: Sequence[str]
) -> bool:
    """Return whether a network runs over fixed memory: on a GPU, with CUDA graphs and fixed outputs.

    Args:
        config, preprocess: of the fused model, and of its preprocessing.
        wanted: names of the outputs of the network that it needs.
    """
    accelerators = network.document.get("optimization", {}).get("execution_accelerators", {})
    names = {each["name"] for each in accelerators.get("gpu_execution_accelerator", ())}
    outputs = [each for each in network.outputs if each.name in wanted]
    return (
        {config.kind, preprocess.kind, network.kind} == {"GPU"}
        and parse_bool(network.parameters.get(CUDA_GRAPHS, "false"))
        and not NEED_OWN_RUNS & network.parameters.keys()
        and max_run_rows(network) >= config.max_batch_size
        and len(network.inputs) == 1
        and names <= {"cuda"}
        and all(min(each.dims, default=1) >= 0 and each.datatype != "TYPE_STRING" for each in outputs)
    )


def check_overlap(config: ModelConfig, is_bound: bool) -> None:
    """Refuse overlapping batches that the model cannot have.

    Raises:
        InvalidConfig: its network does not run over fixed memory.
    """
    if not is_bound:
        raise InvalidConfig(
            f"model '{config.name}', overlap_batches: expected preprocessing and network on a GPU, with "
            f"nereid.cuda_graphs and outputs of fixed shapes, got a network that runs in another way on "
            f"KIND_{config.kind}; fix: remove overlap_batches"
        )


def open_stream(device_id: int) -> Any:
    """Return a stream for the runs of a network."""
    import cupy

    with cupy.cuda.Device(device_id):
        return cupy.cuda.Stream(non_blocking=True)


def open_lanes(
    preprocessor: Any, session: Session, computing: Any, taken: str, wanted: Sequence[str]
) -> Lanes:
    """Record the network's graphs; called by the thread that will run them.

    Args:
        preprocessor: `GpuPreprocessor`, whose tensors the network reads.
        computing: stream of the session.
        taken, wanted: names of the network's input and of its outputs.

    Raises:
        InvalidConfig: a run of the network fails.
    """
    import cupy

    cupy.cuda.Device(preprocessor.device_id).use()
    for tensor in preprocessor.tensors:
        tensor.fill(0)
    cupy.cuda.get_current_stream().synchronize()
    network = session.bind(taken, preprocessor.tensors, wanted)
    return Lanes(cupy.cuda, preprocessor, network, computing, len(preprocessor.tensors))
