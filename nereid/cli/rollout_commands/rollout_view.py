"""Output of the `nereid rollout` commands: tables, sentences or JSON."""

import math
from collections.abc import Sequence

import msgspec

from nereid.cli.tables import print_table
from nereid.models.rollout.orders import Forecast
from nereid.models.rollout.rollout_journal import Rollout, RolloutEvent


def print_status(rollout: Rollout | None, as_json: bool) -> None:
    """Print a rollout in words."""
    if as_json:
        print(msgspec.json.encode(rollout).decode())
    else:
        print(rollout or "no rollout yet; start one: nereid rollout start VARIANT")


def print_rollouts(rollouts: Sequence[Rollout], as_json: bool) -> None:
    """Print all rollouts of a route, newest first."""
    if as_json:
        print(msgspec.json.encode(rollouts[::-1]).decode())
        return
    rows = [
        (
            str(rollout.number),
            _time(rollout.began),
            rollout.user,
            rollout.plan.candidate,
            rollout.step_name,
            rollout.result if rollout.phase == "ended" else rollout.phase,
            "; ".join(rollout.reasons),
        )
        for rollout in reversed(rollouts)
    ]
    print_table("rollout", "began", "who", "candidate", "step", "state", "reasons", rows=rows)


def print_events(events: Sequence[RolloutEvent], as_json: bool) -> None:
    """Print the events of a rollout, oldest first, as a table or as JSON lines."""
    if as_json:
        for event in events:
            print(msgspec.json.encode(event).decode())
        return
    rows = [
        (
            _time(event.time),
            event.user,
            event.event,
            f"{event.elapsed_s:.0f} s" if event.look else "",
            "; ".join(event.reasons),
        )
        for event in events
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
