"""When requests are to be sent in an open loop: at times that do not depend on the answers."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, get_args

Arrivals = Literal["poisson", "fixed"]
ARRIVALS: tuple[Arrivals, ...] = get_args(Arrivals)
NEVER = math.inf


def offsets(rate_per_s: float, arrivals: Arrivals, draw: random.Random) -> Iterator[float]:
    """Yield the seconds after the start at which requests are to be sent, without end.

    Args:
        rate_per_s: how many are sent on average.
        arrivals: `poisson` as independent callers would, `fixed` at equal distances. Fixed ones begin
            anywhere in the first distance, so that several processes do not send in step.
        draw: of the distances.
    """
    at_s = draw.random() / rate_per_s if arrivals == "fixed" else draw.expovariate(rate_per_s)
    while True:
        yield at_s
        at_s += 1 / rate_per_s if arrivals == "fixed" else draw.expovariate(rate_per_s)


def dispatch(
    schedule: Iterable[float],
    start_s: float,
    clock: Callable[[], float],
    wait: Callable[[float], object],
    send: Callable[[float], None],
    end_s: Callable[[], float] = lambda: NEVER,
) -> None:
    """Hand every intended time to `send` once it has come; being late moves none of those that follow.

    Args:
        schedule: seconds after `start_s`, ascending.
        start_s: on the `clock`.
        wait: pauses for so many seconds, or less.
        send: must not wait for the answer.
        end_s: what is intended later is not sent; asked after each pause.
    """
    for offset_s in schedule:
        due_s = start_s + offset_s
        while due_s <= end_s() and (pause_s := due_s - clock()) > 0:
            wait(pause_s)
        if due_s > end_s():
            return
        send(due_s)
