"""Sessions whose memory is short or returned, and sessions with a broken device; all for real."""

import resource
from pathlib import Path

import numpy as np
import pytest

from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import DeviceFailed
from nereid.vision.inference.session import Session, SessionEvents
from tests.faulty_networks import FRAGILE_IO, ILLEGAL_ACCESS, MEBIBYTE, WIDE_IO, fragile, wide
from tests.limited_memory import run_limited
from tests.networks import ONE_INSTANCE, store
from tests.tables import cases

pytestmark = pytest.mark.process
ROW_MEBIBYTES, ROWS = 30, 8
# A batch needs 240 MiB, of which the C library may have kept 30 of the run before, and a half 120. After a
# failure, the C library may reserve 64 more.
FITS_HALF, FITS_KEPT_HALF, FITS_NOTHING = 200, 110, 60
HALVES = 'parameters { key: "nereid.halve_batch_if_out_of_memory" value { string_value: "true" } }\n'
NO_ARENA = 'parameters { key: "enable_mem_arena" value { string_value: "0" } }\n'
# Another thread would reserve 128 MiB for its first allocation.
ONE_THREAD = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'


@pytest.fixture
def store_wide(tmp_path):
    config = f"max_batch_size: {ROWS}\n" + WIDE_IO + ONE_INSTANCE + ONE_THREAD
    return lambda parameters: store(tmp_path, "wide", wide(ROW_MEBIBYTES), config + parameters).parents[1]


@cases(
    ("parameters", "before", "mebibytes"),
    arena=(HALVES, [1], FITS_HALF),
    no_arena=pytest.param(HALVES + NO_ARENA, [1], FITS_HALF, marks=pytest.mark.slow),
    # A half needs more than the limit, and less than the limit and what an earlier batch has left.
    memory_that_an_arena_keeps=(HALVES, [1, 2], FITS_KEPT_HALF),
)
def test_batch_that_does_not_fit_is_run_in_halves(store_wide, parameters, before, mebibytes):
    report = run_limited(store_wide(parameters), before, ROWS, mebibytes)

    assert report == {"error": "", "halved": 1, "runs": [ROWS // 2, ROWS // 2, ROWS]}


def test_halves_that_do_not_fit_fail(store_wide):
    report = run_limited(store_wide(HALVES), before=[1], rows=ROWS, mebibytes=FITS_NOTHING)

    assert report["error"].startswith("OutOfMemory: onnx runtime error 1: ")
    assert (report["halved"], report["runs"]) == (1, [])


def test_every_nth_run_returns_the_memory_of_larger_ones(store_wide):
    every_fourth = 'parameters { key: "nereid.release_memory_every" value { string_value: "4" } }\n'
    session = Session.from_config(ModelConfig.from_file(store_wide(every_fourth), 1))
    resident = []

    for rows in (1, ROWS, 1, 1):
        x = np.arange(rows, dtype=np.float32).reshape(-1, 1)
        assert session.run({"x": x}, ["y"])[0].tolist() == x.tolist()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * resource.getpagesize() / MEBIBYTE / ROW_MEBIBYTES)

    small, large, kept, released = resident
    assert min(large, kept) > small + ROWS / 2
    assert released < small + 1


@cases(
    own_run=(lambda session: session.run_requests([{"shape": np.array([3, 3])}], [["y"]]), ILLEGAL_ACCESS),
    # The steps of one process share the device: a failure of the decoder ends the network's runs, too.
    another_step=(lambda session: session.fail("the decoder's") or [], "device failed: the decoder's"),
)
def test_broken_device_fails_every_later_run(fail, text, tmp_path):
    store(tmp_path, "fragile", fragile(), FRAGILE_IO + ONE_INSTANCE)
    reasons, good = [], {"shape": np.array([2, 2])}
    config = ModelConfig.from_file(tmp_path / "fragile", 1)
    session = Session.from_config(config, events=SessionEvents(on_device_failed=reasons.append))
    assert session.run(good, ["y"])[0].shape == (2, 2)

    outcomes = [*fail(session), *session.run_requests([good], [["y"]])]
    session.fail("it failed again")
    with pytest.raises(DeviceFailed, match=text) as raised:
        session.run(good, ["y"])

    assert {(type(error), error.reason) for error in (*outcomes, raised.value)} == {(DeviceFailed, *reasons)}
