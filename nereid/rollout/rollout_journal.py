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
from typing import Annotated, Any, BinaryIO, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from nereid import files, json_lines
from nereid.errors import OperationFailed
from nereid.rollout.counts import Pair
from nereid.rollout.judge import Look
from nereid.rollout.plan import SHADOW, RolloutPlan
from nereid.routes.target import RouteLocation

# `stepping`: the weights of the step are not confirmed yet; `withdrawing`: the candidate loses its traffic.
Phase = Literal["stepping", "measuring", "paused", "withdrawing", "ended"]
Result = Literal["", "promoted", "rolled back", "aborted"]
Event = Literal[
    "start", "change", "begin", "look", "pass", "fail", "wait", "pause", "resume", "promote", "abort", "end"
]
BUSY = ("stepping", "measuring", "withdrawing")


class RolloutActive(OperationFailed):
    """A rollout of the repository has not ended."""


class Line(Struct, frozen=True, omit_defaults=True):
    """One event of a rollout. `reasons` has the numbers that decided, in words.

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
    look: Look | None = None


class State(Struct, frozen=True):
    """The state of a rollout after some of its lines.

    `intended` is the SHA-256 of the route file before a change that is not confirmed yet, empty without one;
    `sha256` is that of the step's route file. `waiting` says why nothing can be done now, empty otherwise.
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
    look: Look | None = None
    waiting: str = ""

    @property
    def is_active(self) -> bool:
        """Whether the rollout has not ended."""
        return self.phase != "ended"

    @property
    def share(self) -> float:
        """The candidate's part of the traffic in this step, 0 to 1."""
        step = self.plan.steps[self.step]
        return 0.0 if step == SHADOW else float(step) / 100

    @property
    def step_name(self) -> str:
        """The step for people, such as `25 %`."""
        step = self.plan.steps[self.step]
        return "shadow" if step == SHADOW else f"{step:g} %"

    def at(self, step: int) -> "State":
        """Return this state at another step."""
        return replace(self, step=step)

    def after(self, line: Line) -> "State":
        """Return the state after one more line."""
        if line.event == "wait":
            return replace(self, waiting="; ".join(line.reasons))
        return replace(self._after(line), waiting="")

    def _after(self, line: Line) -> "State":
        last = len(self.plan.steps) - 1
        match line.event:
            case "change":
                return replace(self, intended=line.sha256)
            case "begin":
                return replace(
                    self,
                    phase="measuring",
                    intended="",
                    sha256=line.sha256,
                    elapsed_s=0.0,
                    look=None,
                    reasons=(),
                )
            case "look":
                return replace(self, elapsed_s=line.elapsed_s, look=line.look, reasons=line.reasons)
            case "pass":
                return replace(self, phase="stepping", step=self.step + 1, intended="", reasons=line.reasons)
            case "fail":
                return replace(
                    self, phase="withdrawing", result="rolled back", intended="", reasons=line.reasons
                )
            case "pause":
                return replace(self, phase="paused", reasons=line.reasons)
            case "resume":
                return replace(self, phase="stepping", intended="", sha256="", reasons=())
            case "promote":
                return replace(
                    self, phase="stepping", step=last, intended="", sha256="", reasons=line.reasons
                )
            case "abort":
                return replace(self, phase="withdrawing", result="aborted", intended="", reasons=line.reasons)
            case "end":
                return replace(self, phase="ended", result=self.result or "promoted", reasons=line.reasons)
            case _:
                return self


@dataclass(frozen=True, slots=True)
class Journals:
    """The journals of one route's rollouts in a repository."""

    repository: Path
    route: str

    @classmethod
    def of(cls, location: RouteLocation) -> "Journals":
        """Return the journals of a route."""
        return cls(location.config.folder.parent, location.name)

    @property
    def folder(self) -> Path:
        """The folder of all rollouts of the repository."""
        return folder_of(self.repository)

    def path(self, number: int) -> Path:
        """Return the path of the rollout with this number."""
        return self.folder / f"{self.route}.{number}.jsonl"

    def numbers(self) -> list[int]:
        """Return the numbers of all rollouts, ascending."""
        found = (
            path.name[len(self.route) + 1 : -len(".jsonl")]
            for path in self.folder.glob(f"{self.route}.*.jsonl")
        )
        return sorted(int(word) for word in found if word.isdecimal())

    def read(self, number: int) -> State | None:
        """Return the state of a rollout; None if its start was never written.

        Raises:
            OperationFailed: the journal is damaged, or of another release.
        """
        state: State | None = None
        for line in self.lines(number):
            state = state.after(line) if state else _first(number, line)
        return state

    def lines(self, number: int) -> tuple[Line, ...]:
        """Return all lines of a rollout, oldest first."""
        return json_lines.read_all(self.path(number), Line)

    def latest(self) -> State | None:
        """Return the newest rollout, None without any."""
        found = (self.read(number) for number in reversed(self.numbers()))
        return next((state for state in found if state), None)

    def active(self) -> State | None:
        """Return the rollout that has not ended, if there is one."""
        state = self.latest()
        return state if state and state.is_active else None

    @contextlib.contextmanager
    def writing(self, number: int) -> Iterator["Writer"]:
        """Open a rollout's journal under its lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with files.locked_file(self.path(number), "nereid rollout") as file:
            yield Writer(file, number, self.read(number))


@dataclass(slots=True)
class Writer:
    """A rollout's journal, locked; `state` is None before the first line."""

    file: BinaryIO
    number: int
    state: State | None

    def write(self, event: Event, reasons: Sequence[str] = (), first: int = 0, **values: Any) -> None:
        """Append a line durably, and apply it to the state; `first` is the step of the first line."""
        line = Line(
            datetime.now(UTC),
            event,
            step=self.state.step if self.state else first,
            user=json_lines.user_name(os.getuid()),
            reasons=tuple(reasons),
            **values,
        )
        json_lines.append(self.file, line)
        self.state = self.state.after(line) if self.state else _first(self.number, line)


def folder_of(repository: Path) -> Path:
    """Return the folder with the journals of a repository's rollouts."""
    return files.state_folder(repository) / "rollouts"


def routes_of(repository: Path) -> list[str]:
    """Return the routes that have had rollouts, without removed ones."""
    found = {path.name.rsplit(".", 2)[0] for path in folder_of(repository).glob("*.*.jsonl")}
    return sorted(name for name in found if (repository / name).is_dir())


def active_rollouts(repository: Path) -> dict[str, State]:
    """Return the rollouts that have not ended, by route.

    Raises:
        OperationFailed: a journal is damaged, or of another release.
    """
    states = {route: Journals(repository, route).active() for route in routes_of(repository)}
    return {route: state for route, state in states.items() if state}


def check_none_active(repository: Path, what: str, only: str = "") -> None:
    """Raise `RolloutActive` if a rollout, or that of route `only`, is active: `what` would disturb it."""
    for route, state in active_rollouts(repository).items():
        if only in ("", route):
            raise RolloutActive(
                f"cannot {what}: the rollout of '{state.plan.candidate}' on route '{route}' is at step "
                f"{state.step_name}; fix: wait, or nereid rollout abort"
            )


def _first(number: int, line: Line) -> State | None:
    if line.event != "start" or not line.plan or not line.pair:
        return None
    return State(number, line.plan, line.pair, line.slow_s, line.risk, line.time, line.user, step=line.step)
