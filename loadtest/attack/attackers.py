"""Processes that attack a guarded server in a loop."""

import contextlib
import io
import itertools
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from PIL import Image

from loadtest.attack.attacks import ATTACKS, INFER, Attack, Front, post

RAW = {"Inference-Header-Content-Length": "0"}


def _large_image() -> bytes:
    """Return a file of a few kB with 64 megapixels."""
    with io.BytesIO() as file:
        Image.new("RGB", (8000, 8000)).save(file, "WEBP", lossless=True)
        return file.getvalue()


def _attack(front: Front, number: int, over: Any, reports: Any) -> None:
    """Send attacks in a loop, every other attacker large images; report the number of each status."""
    os.nice(19)  # the attackers of a real server have cores of their own
    statuses: Counter[str] = Counter()
    attacks: tuple[Attack, ...] = ATTACKS
    if number % 2:
        large = _large_image()
        attacks = (Attack("large", lambda front: post(front, INFER, large, RAW), frozenset()),)
    for each in itertools.cycle(attacks):
        if over.is_set():
            break
        statuses[each.send(front)] += 1
    reports.put(statuses)


@contextlib.contextmanager
def attackers(front: Front, count: int) -> Iterator[Counter[str]]:
    """Run attackers while the context lasts; then gives the number of their requests by status."""
    context = multiprocessing.get_context("spawn")
    over, reports, statuses = context.Event(), context.Queue(), Counter[str]()
    processes = [
        context.Process(target=_attack, args=(front, number, over, reports), daemon=True)
        for number in range(count)
    ]
    for process in processes:
        process.start()
    try:
        yield statuses
    finally:
        over.set()
        for _ in processes:
            statuses.update(reports.get(timeout=120))
        for process in processes:
            process.join()
