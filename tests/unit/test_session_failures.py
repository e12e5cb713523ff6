"""Sessions whose runs fail for real: for lack of memory, and with a broken device."""

import resource
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from nereid.config.model_config import ModelConfig
from nereid.inference.session import Session
from nereid.inference.session_events import SessionEvents
from nereid.serving_errors import DeviceFailed, OutOfMemory
from tests.faulty_networks import FRAGILE_IO, ILLEGAL_ACCESS, MEBIBYTE, WIDE_IO, fragile, wide
from tests.networks import ONE_INSTANCE, store

ROW_MEBIBYTES, ROWS = 30, 8
# A batch needs 240 MiB, and a half 120. After a failure, the C library may reserve 64 more.
FITS_HALF, FITS_KEPT_HALF, FITS_NOTHING = 220, 110, 60
HALVES = 'parameters { key: "nereid.halve_batch_if_out_of_memory" value { string_value: "true" } }\n'
# Another thread would reserve 128 MiB for its first allocation.
ONE_THREAD = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'
NO_ARENA = 'parameters { key: "enable_mem_arena" value { string_value: "0" } }\n'


@contextmanager
def at_most(mebibytes: int):
    """Limit the memory that this process may add."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + mebibytes * MEBIBYTE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Wide:
    """A session of `wide` that has run a row, and what happens in it later."""

    def __init__(self, folder, parameters: str) -> None:
        config = f"max_batch_size: {ROWS}\n" + WIDE_IO + ONE_INSTANCE + ONE_THREAD + parameters
        store(folder, "wide", wide(ROW_MEBIBYTES), config)
        self.rows, self.halved = [], 0
        events = SessionEvents(lambda seconds, rows: self.rows.append(rows), self._halve)
        self.session = Session.from_config(ModelConfig.from_file(folder / "wide", 1), events=events)
        self.session.run({"x": np.ones((1, 1), np.float32)}, ["y"])
        self.rows.clear()

    def _halve(self) -> None:
        self.halved += 1


@pytest.mark.parametrize("parameters", [HALVES, HALVES + NO_ARENA], ids=["arena", "no arena"])
def test_batch_that_does_not_fit_is_run_in_halves(tmp_path, parameters):
    """Its rows are right and in order; the next batch is tried as a whole again."""
    wide_one = Wide(tmp_path, parameters)
    rows = np.arange(1, ROWS + 1, dtype=np.float32).reshape(-1, 1)

    with at_most(FITS_HALF):
        (found,) = wide_one.session.run({"x": rows}, ["y"])
    (after,) = wide_one.session.run({"x": rows}, ["y"])

    assert found.tolist() == after.tolist() == rows.tolist()
    assert (wide_one.halved, wide_one.rows) == (1, [ROWS // 2, ROWS // 2, ROWS])


def test_halves_that_do_not_fit_fail(tmp_path):
    """The batch is divided once only."""
    wide_one = Wide(tmp_path, HALVES)
    rows = np.ones((ROWS, 1), np.float32)

    with at_most(FITS_NOTHING), pytest.raises(OutOfMemory, match="Failed to allocate memory"):
        wide_one.session.run({"x": rows}, ["y"])

    assert (wide_one.halved, wide_one.rows) == (1, [])


def test_batch_is_not_divided_by_default(tmp_path):
    """Without the parameter, the batch fails with ONNX Runtime's text."""
    wide_one = Wide(tmp_path, "")

    with at_most(FITS_HALF), pytest.raises(OutOfMemory, match=r"^onnx runtime error 1: "):
        wide_one.session.run({"x": np.ones((ROWS, 1), np.float32)}, ["y"])

    assert (wide_one.halved, wide_one.rows) == (0, [])


def test_memory_that_an_arena_keeps_is_released(tmp_path):
    """Before the halves run, the arena returns what an earlier batch has left in it."""
    wide_one = Wide(tmp_path, HALVES)
    wide_one.session.run({"x": np.ones((2, 1), np.float32)}, ["y"])
    rows = np.arange(1, ROWS + 1, dtype=np.float32).reshape(-1, 1)

    # A half needs 120 MiB: more than the limit, and less than the limit and what is kept together.
    with at_most(FITS_KEPT_HALF):
        (found,) = wide_one.session.run({"x": rows}, ["y"])

    assert found.tolist() == rows.tolist()


def test_broken_device_fails_every_later_run(tmp_path):
    """It is reported once; later runs do not use the device."""
    store(tmp_path, "fragile", fragile(), FRAGILE_IO + ONE_INSTANCE)
    reasons = []
    session = Session.from_config(
        ModelConfig.from_file(tmp_path / "fragile", 1),
        events=SessionEvents(device_failed=reasons.append),
    )

    first, second = (
        session.run_requests([{"shape": np.array(shape)}], [["y"]])[0] for shape in ([3, 3], [2, 2])
    )

    assert isinstance(first, DeviceFailed)
    assert str(first) == str(second)
    assert ILLEGAL_ACCESS in reasons[0]
    assert len(reasons) == 1
