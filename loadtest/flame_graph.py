"""Flame graphs of sampled stacks as SVG, without the threads that wait.

The samples come from py-spy and `perf`. The graph of py-spy shows threads that wait for a lock as busy, and
the one of `perf` needs a network.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from zlib import crc32

WIDTH_PX, ROW_PX, LETTER_PX = 1200, 17, 6.6
# Narrower frames cannot be seen.
MIN_PX = 0.4
UNKNOWN = "[unknown]"
# The innermost functions of a thread that waits: for a lock, a message, a connection.
WAITS = frozenset(
    {
        *("PyThread_acquire_lock_timed", "pthread_cond_wait", "pthread_cond_timedwait", "sem_wait"),
        *("sem_timedwait", "epoll_wait", "epoll_pwait", "poll", "select", "clock_nanosleep"),
    }
)
LIBC = "[libc.so.6]"
# A frame of a library without symbols, such as `0x7fba33194bfc (onnxruntime/capi/state.so)`.
ADDRESS = re.compile(r"^0x[0-9a-f]+ \((?:.*/)?(.*)\)$")
# A line such as `    7f8e1a2b malloc+0x1d (/usr/lib/libc.so.6)`.
FRAME = re.compile(r"^\s+[0-9a-f]+ (.*) \((.*)\)$")

Stack = tuple[str, ...]


@dataclass(slots=True)
class _Node:
    count: int = 0
    children: "dict[str, _Node]" = field(default_factory=dict)


def read_pyspy(raw: str) -> Counter[Stack]:
    """Return how often each stack was sampled, the outermost function first, without threads that wait.

    Functions of a library without symbols have the name of the library.

    Args:
        raw: output of `py-spy record --format raw --native`.
    """
    found = Counter[Stack]()
    for line in raw.splitlines():
        text, _, count = line.rpartition(" ")
        frames = [ADDRESS.sub(r"[\1]", each) for each in text.split(";") if not each.startswith("process ")]
        stack = tuple(_without_repeats(frames))
        if not is_waiting(stack):
            # The C library's start of a thread is in some stacks only: a library without symbols hides it.
            found[stack[stack[0] == LIBC :]] += int(count)
    return found


def is_waiting(stack: Stack) -> bool:
    """Return whether a thread waits: in a function for that, or outside of Python in the C library alone."""
    names = {frame.partition(" (")[0] for frame in stack}
    return bool(names & WAITS) or names <= {LIBC}


def read_perf(script: str) -> Counter[Stack]:
    """Return how often each stack was on a core, the outermost function first.

    Args:
        script: output of `perf script -F comm,ip,sym,dso`.
    """
    found = Counter[Stack]()
    for block in script.split("\n\n"):
        name, *lines = block.strip("\n").splitlines() or [""]
        frames = [frame for line in lines if (frame := _frame(line))]
        if frames:
            found[name.strip(), *_without_repeats(frames[::-1])] += 1
    return found


def _without_repeats(frames: list[str]) -> list[str]:
    return [frame for frame, _ in groupby(frames)]


def _frame(line: str) -> str:
    if not (match := FRAME.match(line)):
        return ""
    symbol, library = match[1].partition("+0x")[0], match[2].rpartition("/")[2].strip("[]")
    return f"[{library}]" if symbol == UNKNOWN else f"{symbol} ({library})"


def draw(stacks: Counter[Stack], title: str) -> str:
    """Return the flame graph: a frame's width is its share of the samples, callers are above callees."""
    root = _Node()
    for stack, count in stacks.items():
        node = root
        node.count += count
        for frame in stack:
            node = node.children.setdefault(frame, _Node())
            node.count += count
    rows = max(map(len, stacks), default=0)
    height = (rows + 3) * ROW_PX
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH_PX}" height="{height}" '
        f'viewBox="0 0 {WIDTH_PX} {height}" font-family="monospace" font-size="11">'
    )
    heading = f'<text x="4" y="{ROW_PX}">{escape(title)}: {root.count} samples</text>'
    return "\n".join([head, heading, *_boxes(root, root.count, 0.0, 2), "</svg>"]) + "\n"


def _boxes(node: _Node, total: int, left_px: float, row: int) -> Iterator[str]:
    """Yield the frames below a node, the widest first."""
    for name, child in sorted(node.children.items(), key=lambda pair: (-pair[1].count, pair[0])):
        width_px = WIDTH_PX * child.count / total
        if width_px >= MIN_PX:
            top_px = row * ROW_PX
            label = name[: int(width_px / LETTER_PX)] if width_px > 4 * LETTER_PX else ""
            text = f'<text x="{left_px + 2:.1f}" y="{top_px + 12}">{escape(label)}</text>' if label else ""
            about = f"{escape(name)}: {child.count} samples, {child.count / total:.1%}"
            yield (
                f'<g><title>{about}</title><rect x="{left_px:.1f}" y="{top_px}" width="{width_px:.1f}" '
                f'height="{ROW_PX - 1}" fill="{_colour(name)}"/>{text}</g>'
            )
            yield from _boxes(child, total, left_px, row + 1)
        left_px += width_px


def _colour(name: str) -> str:
    """Return a warm colour that is the same for the same name."""
    number = crc32(name.encode())
    return f"rgb({220 + number % 36},{120 + number // 36 % 90},{60 + number // 3240 % 60})"
