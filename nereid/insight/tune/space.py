"""The search space: the settings that a model's backend reads, their values, and a balanced sample."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from nereid.insight.tune.profiles import DELAY, INSTANCES, MAX_BATCH_SIZE, PREFERRED, value_of
from nereid.repository.layout import SERVED
from nereid.tasks import BY_BACKEND

# One point of the space, in the order of its names; the empty one is the present config.
Candidate: TypeAlias = tuple[tuple[str, int], ...]
Space: TypeAlias = Mapping[str, tuple[int, ...]]

DEFAULT: Candidate = ()
DELAYS_US = (0, 500, 2_000, 5_000)
PREFERRED_SIZES = (2, 4, 8, 16)
THREADS, DECODE_THREADS = "intra_op_thread_count", "decode_threads"
# The parameter's name in a network's config, and in that of a fused model.
RUN_ROWS = {"onnxruntime": "nereid.run_batch_size", "fused": "run_batch_size"}
# Rows of one run of a network; 0 is the whole batch, or for a fused model its network's setting.
RUN_SIZES = (0, 1, 2, 4, 8)
# `max_batch_size` is never lowered, since clients may rely on it; batches below this size cost throughput.
USUAL_ROWS = 8


def space(config: Any, backend: str, cores: int) -> Space:
    """Return the values of each setting that takes effect.

    Args:
        config: the model's config, as completed by the server.
        backend: the model's backend. A `fused` model has the settings of both its parts.
        cores: number of cores of this machine.
    """
    found: dict[str, tuple[int, ...]] = {}
    if len(config.instance_group) <= 1:
        found[INSTANCES] = tuple(sorted({*_doublings(cores), cores, cores + max(1, cores // 2)}))
    is_on_cpu = all(group.kind != group.KIND_GPU for group in config.instance_group)
    if is_on_cpu and (backend in RUN_ROWS or _runs_networks(config, backend)):
        found[THREADS] = _doublings(cores)
    if is_on_cpu and backend == "preprocess":
        found[DECODE_THREADS] = _doublings(cores)
    if config.max_batch_size and not config.HasField("sequence_batching"):
        smallest = max(config.max_batch_size, USUAL_ROWS)
        found[MAX_BATCH_SIZE] = tuple(sorted({config.max_batch_size, smallest, 2 * smallest}))
        found[PREFERRED] = PREFERRED_SIZES
        found[DELAY] = DELAYS_US
        if is_on_cpu and backend in RUN_ROWS:
            found[RUN_ROWS[backend]] = RUN_SIZES
    found = {name: tuple(sorted({*values, value_of(config, name)})) for name, values in found.items()}
    if PREFERRED in found:  # without a preferred size, Triton prefers the largest batch
        found[PREFERRED] = tuple(value for value in found[PREFERRED] if value)
    return found


def _runs_networks(config: Any, backend: str) -> bool:
    of_task = BY_BACKEND[backend].backend if backend in BY_BACKEND else None
    place = of_task.networks if of_task else ""
    if place and "networks" in config.parameters:
        place = config.parameters["networks"].string_value
    return bool(place) and place != SERVED


def _doublings(limit: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(limit.bit_length()))


def points(space: Space, cores: int) -> Iterator[Candidate]:
    """Yield all sensible points of the grid."""
    for values in itertools.product(*space.values()):
        candidate = tuple(zip(space, values, strict=True))
        if is_sensible(candidate, cores):
            yield candidate


def is_sensible(candidate: Candidate, cores: int) -> bool:
    """Return whether a point is worth a measurement: not too many threads, and possible batches."""
    value = dict(candidate)
    threads = value.get(INSTANCES, 1) * value.get(THREADS, 1) * value.get(DECODE_THREADS, 1)
    return threads <= 2 * max(cores, value.get(INSTANCES, 1)) and (
        value.get(PREFERRED, 0) <= value.get(MAX_BATCH_SIZE, 0)
    )


def present(space: Space, config: Any) -> Candidate:
    """Return the point of the space that a config has."""
    return tuple((name, value_of(config, name)) for name in space)


def sample(
    grid: Sequence[Candidate], space: Space, count: int, seed: int, without: Candidate
) -> list[Candidate]:
    """Draw candidates in which the values of each setting occur about equally often.

    Args:
        grid: all candidates.
        space: the space of the grid.
        count: maximum number of candidates.
        seed: random seed.
        without: a candidate to leave out.
    """
    draw, left = random.Random(seed), {*grid} - {without}
    columns = [_shuffled(draw, values, 4 * count) for values in space.values()]
    balanced = [tuple(zip(space, row, strict=True)) for row in zip(*columns, strict=True)]
    rest = draw.sample(sorted(left), len(left))
    return [each for each in dict.fromkeys([*balanced, *rest]) if each in left][:count]


def _shuffled(draw: random.Random, values: Sequence[int], length: int) -> list[int]:
    """Repeat the values in random orders, so that each part of the column has every value about once."""
    column: list[int] = []
    while len(column) < length:
        column += draw.sample(values, len(values))
    return column[:length]
