"""Output of the `nereid rollout` commands: tables, sentences or JSON."""

import math
from collections.abc import Sequence

import msgspec

from nereid.cli.tables import print_table
from nereid.rollout.orders import Forecast
from nereid.rollout.progress import describe
from nereid.rollout.rollout_journal import Line, State


def print_status(state: State | None, as_json: bool) -> None:
    """Print a rollout in words."""
    if as_json:
        print(msgspec.json.encode(state).decode())
    elif state is None:
        print("no rollout yet; start one: nereid rollout start VARIANT")
    else:
        print(describe(state))


def print_rollouts(states: Sequence[State], as_json: bool) -> None:
    """Print all rollouts of a route, newest first."""
    if as_json:
        print(msgspec.json.encode(states[::-1]).decode())
        return
    rows = [
        (
            str(each.number),
            _time(each.began),
            each.user,
            each.plan.candidate,
            each.step_name,
            each.result if each.phase == "ended" else each.phase,
            "; ".join(each.reasons),
        )
        for each in reversed(states)
    ]
    print_table("rollout", "began", "who", "candidate", "step", "state", "reasons", rows=rows)


def print_events(lines: Sequence[Line], as_json: bool) -> None:
    """Print the events of a rollout, oldest first, as a table or as JSON lines."""
    if as_json:
        for line in lines:
            print(msgspec.json.encode(line).decode())
        return
    rows = [
        (
            _time(each.time),
            each.user,
            each.event,
            f"{each.elapsed_s:.0f} s" if each.look else "",
            "; ".join(each.reasons),
        )
        for each in lines
    ]
    print_table("when", "who", "event", "measured", "reasons", rows=rows)


def print_forecast(found: Sequence[Forecast]) -> None:
    """Print what each step needs."""
    rows = [
        (
            each.step,
            f"{each.requests:,}" if each.requests else "—",
            "unknown (no traffic)" if math.isinf(each.seconds) else f"{each.seconds:,.0f} s",
            each.what,
        )
        for each in found
    ]
    print_table("step", "requests of all callers, about", "minimum duration", "limited by", rows=rows)


def _time(when: object) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S}"
