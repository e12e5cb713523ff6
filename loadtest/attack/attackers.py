"""Processes that attack a guarded server in a loop; they import this module, and cannot import `__main__`."""

import contextlib
import itertools
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from loadtest.attack.attacks import ATTACKS, COSTLY_ATTACKS, Front
from loadtest.attack.floods import FLOODS


def _attack(front: Front, number: int, over: Any, reports: Any) -> None:
    """Send attacks in a loop, every other attacker costly images; report the number of each status."""
    os.nice(19)  # the attackers of a real server have cores of their own
    statuses: Counter[str] = Counter()
    for attack in itertools.cycle(COSTLY_ATTACKS if number % 2 else (*ATTACKS, *FLOODS)):
        if over.is_set():
            break
        statuses[attack.send(front)] += 1
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
