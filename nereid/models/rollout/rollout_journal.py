"""The journal of a rollout: each event is written there first, so a killed controller can continue.

A rollout has one file of JSON lines, next to the repository's other state. Its state is computed from its
lines. Its lock is held while a line is written, so a command and the controller cannot contradict each other.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from nereid.base import files
from nereid.base.errors import OperationFailed
from nereid.base.journal import Append, Journal, user_name
from nereid.models.rollout.judge import PairCounts
from nereid.models.rollout.plan import SHADOW, Pair, RolloutPlan
from nereid.models.routes.location import RouteLocation

# `stepping`: the weights of the step are not confirmed yet; `withdrawing`: the candidate loses its traffic.
Phase = Literal["stepping", "measuring", "paused", "withdrawing", "ended"]
Result = Literal["", "promoted", "rolled back", "aborted"]
Event = Literal[
    "start", "change", "begin", "look", "pass", "fail", "wait", "pause", "resume", "promote", "abort", "end"
]
BUSY = ("stepping", "measuring", "withdrawing")
PHASES: dict[Phase, str] = {
    "stepping": "changing the weights to step",
    "measuring": "measuring step",
    "paused": "paused at step",
    "withdrawing": "rolling back from step",
    "ended": "ended at step",
}


class RolloutActive(OperationFailed):
    """A rollout of the repository is still active."""


class RolloutEvent(Struct, frozen=True, omit_defaults=True):
    """One event of a rollout. `reasons` gives the numbers that decided, in words.

    Attributes:
        plan, pair, slow_s, risk: of `start`: the plan, the compared variants, the bucket's bound above which
            a request is slow, and the risk of each step.
        sha256: of `change`: the route file before it; of `begin`: the route file of the step.
        elapsed_s, look: of `look`: the measured time of the step, and all its counts.
    """

    time: Annotated[datetime, Meta(tz=True)]
    event: Event
    step: int = 0
    user: str = ""
    reasons: tuple[str, ...] = ()
    plan: RolloutPlan | None = None
    pair: Pair | None = None
    slow_s: float = 0.0
    risk: float = 0.0
    sha256: str = ""
    elapsed_s: float = 0.0
    look: PairCounts | None = None


class Rollout(Struct, frozen=True):
    """A rollout after some of its events.

    `intended` is the SHA-256 of the route file before a change that is not confirmed yet, empty without one;
    `sha256` is for the step's route file. `waiting` says why nothing can be done now, empty otherwise.
    """

    number: int
    plan: RolloutPlan
    pair: Pair
    slow_s: float
    risk: float
    began: datetime
    user: str
    phase: Phase = "stepping"
    step: int = 0
    result: Result = ""
    reasons: tuple[str, ...] = ()
    intended: str = ""
    sha256: str = ""
    elapsed_s: float = 0.0
    look: PairCounts | None = None
    waiting: str = ""

    @property
    def is_active(self) -> bool:
        """Whether the rollout is still running."""
        return self.phase != "ended"

    @property
    def share(self) -> float:
        """The candidate's fraction of the traffic in this step, 0 to 1."""
        step = self.plan.steps[self.step]
        return 0.0 if step == SHADOW else float(step) / 100

    @property
    def step_name(self) -> str:
        """The step as shown to people, such as `25 %`."""
        step = self.plan.steps[self.step]
        return "shadow" if step == SHADOW else f"{step:g} %"

    def __str__(self) -> str:
        result = f"{self.result}, " if self.phase == "ended" else ""
        text = (
            f"rollout {self.number} of {self.plan.candidate}: {result}{PHASES[self.phase]} {self.step_name}"
        )
        if self.phase == "measuring":
            text += f", after {self.elapsed_s:.0f} s"
        details = [*self.reasons, *([f"waiting: {self.waiting}"] if self.waiting else ())]
        return f"{text}: {'; '.join(details)}" if details else text

    def after(self, event: RolloutEvent) -> "Rollout":
        """Return the rollout after one more event."""
        if event.event == "wait":
            return replace(self, waiting="; ".join(event.reasons))
        return replace(self, waiting="", **self._changes(event))

    def _changes(self, event: RolloutEvent) -> dict[str, Any]:
        why = {"reasons": event.reasons}
        match event.event:
            case "change":
                return {"intended": event.sha256}
            case "begin":
                measured = {"elapsed_s": 0.0, "look": None, "reasons": ()}
                return {"phase": "measuring", "intended": "", "sha256": event.sha256} | measured
            case "look":
                return {"elapsed_s": event.elapsed_s, "look": event.look} | why
            case "pass":
                return {"phase": "stepping", "step": self.step + 1, "intended": ""} | why
            case "fail" | "abort":
                result = "rolled back" if event.event == "fail" else "aborted"
                return {"phase": "withdrawing", "result": result, "intended": ""} | why
            case "pause":
                return {"phase": "paused"} | why
            case "resume":
                return {"phase": "stepping", "intended": "", "sha256": "", "reasons": ()}
            case "promote":
                last_step = len(self.plan.steps) - 1
                return {"phase": "stepping", "step": last_step, "intended": "", "sha256": ""} | why
            case "end":
                return {"phase": "ended", "result": self.result or "promoted"} | why
            case _:
                return {}


@dataclass(frozen=True, slots=True)
class RolloutJournals:
    """The journals of one route's rollouts in a repository."""

    repository: Path
    route: str

    @classmethod
    def of(cls, location: RouteLocation) -> "RolloutJournals":
        """Return the journals of a route."""
        return cls(location.repository, location.name)

    def journal(self, number: int) -> Journal[RolloutEvent]:
        """Return the journal of the rollout with this number."""
        path = folder_of(self.repository) / f"{self.route}.{number}.jsonl"
        return Journal(path, RolloutEvent, "nereid rollout")

    def numbers(self) -> list[int]:
        """Return the numbers of all rollouts, ascending."""
        paths = folder_of(self.repository).glob(f"{self.route}.*.jsonl")
        stems = (path.name[len(self.route) + 1 : -len(".jsonl")] for path in paths)
        return sorted(int(word) for word in stems if word.isdecimal())

    def read(self, number: int) -> Rollout | None:
        """Return a rollout; None if its start was never written.

        Raises:
            OperationFailed: the journal is damaged, or from another release.
        """
        rollout: Rollout | None = None
        for event in self.journal(number).read():
            rollout = rollout.after(event) if rollout else _first(number, event)
        return rollout

    def latest(self) -> Rollout | None:
        """Return the newest rollout, None without any."""
        rollouts = (self.read(number) for number in reversed(self.numbers()))
        return next((rollout for rollout in rollouts if rollout), None)

    def active(self) -> Rollout | None:
        """Return the active rollout, if there is one."""
        rollout = self.latest()
        return rollout if rollout and rollout.is_active else None

    @contextlib.contextmanager
    def writing(self, number: int) -> Iterator["Writer"]:
        """Open a rollout's journal under its lock."""
        journal = self.journal(number)
        journal.path.parent.mkdir(parents=True, exist_ok=True)
        with journal.locked() as append:
            yield Writer(append, journal.path, number, self.read(number))


@dataclass(slots=True)
class Writer:
    """A rollout's journal, locked; `rollout` is None before the first event."""

    append: Append[RolloutEvent]
    path: Path
    number: int
    rollout: Rollout | None

    @property
    def started(self) -> Rollout:
        """The rollout, whose start must have been written."""
        if self.rollout is None:
            raise OperationFailed(f"journal '{self.path}' has no start; fix: remove the file")
        return self.rollout

    def write(self, event: Event, reasons: Sequence[str] = (), first: int = 0, **values: Any) -> None:
        """Append an event, and apply it to the rollout; `first` is the step of the first event."""
        step = self.rollout.step if self.rollout else first
        user, now = user_name(os.getuid()), datetime.now(UTC)
        made = RolloutEvent(now, event, step=step, user=user, reasons=tuple(reasons), **values)
        self.append(made)
        self.rollout = self.rollout.after(made) if self.rollout else _first(self.number, made)


def folder_of(repository: Path) -> Path:
    """Return the folder with the journals of a repository's rollouts."""
    return files.state_folder(repository) / "rollouts"


def routes_of(repository: Path) -> list[str]:
    """Return the routes that have had rollouts, without removed ones."""
    names = {path.name.rsplit(".", 2)[0] for path in folder_of(repository).glob("*.*.jsonl")}
    return sorted(name for name in names if (repository / name).is_dir())


def active_rollouts(repository: Path) -> dict[str, Rollout]:
    """Return the rollouts that have not ended, by route.

    Raises:
        OperationFailed: a journal is damaged, or of another release.
    """
    rollouts = {route: RolloutJournals(repository, route).active() for route in routes_of(repository)}
    return {route: rollout for route, rollout in rollouts.items() if rollout}


def check_none_active(repository: Path, action: str, only: str = "") -> None:
    """Raise `RolloutActive` if a rollout, of route `only` if set, is active: `action` would disturb it."""
    for route, rollout in active_rollouts(repository).items():
        if only in ("", route):
            raise RolloutActive(
                f"cannot {action}: the rollout of '{rollout.plan.candidate}' on route '{route}' is at step "
                f"{rollout.step_name}; fix: wait, or nereid rollout abort"
            )


def _first(number: int, event: RolloutEvent) -> Rollout | None:
    if event.event != "start" or not event.plan or not event.pair:
        return None
    start = event.plan, event.pair, event.slow_s, event.risk, event.time, event.user
    return Rollout(number, *start, step=event.step)
