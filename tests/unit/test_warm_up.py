"""Runs of a network at load: their sizes, their inputs, and their failures."""

from pathlib import Path

import numpy as np
import pytest

from nereid.base.config.model_config import ModelConfig
from nereid.base.serving_errors import InvalidConfig
from nereid.vision.inference.run_sizes import warm_batch_sizes
from nereid.vision.inference.session import Session, SessionEvents
from tests.faulty_networks import FRAGILE_IO, fragile
from tests.networks import ONE_INSTANCE, identity, store, tensor
from tests.tables import cases


def warming(sizes: str) -> str:
    return f'parameters {{ key: "nereid.warm_batch_sizes" value {{ string_value: "{sizes}" }} }}\n'


def config(parameters: dict[str, str], max_batch_size: int) -> ModelConfig:
    given = {name: {"string_value": text} for name, text in parameters.items()}
    return ModelConfig.from_document({"max_batch_size": max_batch_size, "parameters": given}, Path("m"), 1)


@cases(
    ("parameters", "max_batch_size", "expected"),
    {
        "powers of two": ({}, 8, [1, 2, 4, 8]),
        "and the largest": ({}, 12, [1, 2, 4, 8, 12]),
        "no batches": ({}, 0, [1]),
        "divided batches": ({"nereid.run_batch_size": "2"}, 8, [1, 2]),
        "given": ({"nereid.warm_batch_sizes": "3, 8"}, 8, [3, 8]),
        "turned off": ({"nereid.warm_batch_sizes": ""}, 8, []),
    },
)
def test_sizes_of_a_slow_first_run(parameters, max_batch_size, expected):
    assert warm_batch_sizes(config(parameters, max_batch_size), is_default=True) == expected


def test_other_providers_run_nothing_at_load():
    assert warm_batch_sizes(config({}, 8), is_default=False) == []


@pytest.mark.parametrize("sizes", ["9", "0", "two", "1 2"])
def test_sizes_outside_of_the_batches_fail_the_load(sizes):
    with pytest.raises(InvalidConfig, match=f"numbers from 1 to 8 with commas, got '{sizes}'"):
        warm_batch_sizes(config({"nereid.warm_batch_sizes": sizes}, 8), is_default=False)


def opened(folder, model, text: str) -> tuple[list[float], list[int]]:
    """Open a network; returns the seconds of its runs at load, and the rows of its other runs."""
    warmed, ran = [], []
    store(folder, "m", model, text + ONE_INSTANCE)
    Session.from_config(
        ModelConfig.from_file(folder / "m", 1),
        events=SessionEvents(ran=lambda seconds, rows: ran.append(rows), warmed=warmed.append),
    )
    return warmed, ran


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "INT8", "BOOL", "STRING"])
def test_network_is_run_at_load(tmp_path, datatype):
    io = tensor("input", "x", datatype, [3]) + tensor("output", "y", datatype, [3])
    model = identity(datatype, ["N", 3])

    warmed, ran = opened(tmp_path, model, "max_batch_size: 8\n" + io + warming("1,2,8"))

    assert len(warmed) == 3
    assert np.all(np.array(warmed) > 0)
    assert ran == []


def test_variable_dim_fails_the_load_with_the_parameter(tmp_path):
    io = tensor("input", "x", "FP32", [-1]) + tensor("output", "y", "FP32", [-1])

    with pytest.raises(InvalidConfig, match=r"expected inputs of fixed dims, got 'x' \[-1\]"):
        opened(tmp_path, identity("FP32", ["N", "M"]), "max_batch_size: 8\n" + io + warming("1"))


def test_failing_run_fails_the_load(tmp_path):
    with pytest.raises(InvalidConfig, match=r"run of 1 row\(s\) of zeros at load: unavailable"):
        opened(tmp_path, fragile(), FRAGILE_IO + warming("1"))
