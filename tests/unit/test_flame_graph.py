"""Flame graphs from the output of py-spy and perf."""

import re
from collections import Counter
from xml.etree import ElementTree

import pytest

from loadtest.flame_graph import WIDTH_PX, draw, is_waiting, read_perf, read_pyspy

PYSPY = """process 7:"/a folder/stub model.py";execute (model.py:21);0x7f01 (onnx/capi/state.so);0x7f02 (onnx/capi/state.so) 3
process 7:"/a folder/stub model.py";0x7f03 (libc.so.6) 50
process 7:"/a folder/stub model.py";_worker (thread.py:81);PyThread_acquire_lock_timed (libpython3.11.so) 70
0x7f03 (libc.so.6);execute (model.py:21);decode (decode.py:9) 1
"""  # noqa: E501
PERF = """stub
    7f01 memcpy+0x1d (/usr/lib/libc.so.6)
    7f02 run+0x0 (/a folder/state.so)
    7f03 [unknown] (/a folder/state.so)
    7f04 [unknown] (/a folder/state.so)

stub
    7f05 [unknown] ([unknown])

"""


def test_pyspys_stacks_have_no_addresses_and_no_waits():
    """Addresses of one library become one frame; threads that wait are left out."""
    assert read_pyspy(PYSPY) == Counter(
        {
            ("execute (model.py:21)", "[state.so]"): 3,
            ("execute (model.py:21)", "decode (decode.py:9)"): 1,
        }
    )


def test_perfs_stacks_begin_with_the_process():
    """The innermost function comes last, without its offset."""
    assert read_perf(PERF) == Counter(
        {("stub", "[state.so]", "run (state.so)", "memcpy (libc.so.6)"): 1, ("stub", "[unknown]"): 1}
    )


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        (("[libc.so.6]",), True),
        (("execute (model.py:21)", "sem_wait (libc.so.6)"), True),
        (("execute (model.py:21)", "[libc.so.6]"), False),
        (("poll_models (watch.py:3)",), False),
    ],
    ids=["nothing but the C library", "a lock", "copying memory", "a name that begins like a wait"],
)
def test_waiting_threads(stack, expected):
    """Only functions that wait, and the bare C library, are waits."""
    assert is_waiting(stack) == expected


def boxes(picture: str) -> dict[str, tuple[float, float, float]]:
    """Return left edge, top and width of each frame by its name."""
    found = {}
    for group in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}g"):
        title, box = group[0].text, group[1].attrib
        assert title
        name = title.rpartition(": ")[0]
        found[name] = (float(box["x"]), float(box["y"]), float(box["width"]))
    return found


def test_frames_are_as_wide_as_their_share():
    """A frame is below its caller and within it; siblings do not overlap."""
    picture = draw(Counter({("main", "run <fast>"): 3, ("main", "wait & see"): 1, ("other",): 4}), "all")
    found = boxes(picture)

    assert {name: width for name, (_, _, width) in found.items()} == {
        "main": WIDTH_PX / 2,
        "run <fast>": WIDTH_PX * 3 / 8,
        "wait & see": WIDTH_PX / 8,
        "other": WIDTH_PX / 2,
    }
    assert found["main"][0] == found["run <fast>"][0]
    assert found["wait & see"][0] == found["run <fast>"][2]
    assert found["run <fast>"][1] > found["main"][1]
    assert re.search("all: 8 samples", picture)
    assert "run &lt;fast&gt;: 3 samples, 37.5%" in picture


def test_no_samples_make_an_empty_graph():
    """A process that only waited has a picture with a heading."""
    assert boxes(draw(Counter(), "idle")) == {}
