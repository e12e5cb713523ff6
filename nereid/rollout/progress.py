"""The state of rollouts for people and for Prometheus."""

from pathlib import Path

from nereid.errors import OperationFailed
from nereid.metrics_page import Labels, render
from nereid.rollout.rollout_journal import Phase, State, active_rollouts

WORDS: dict[Phase, str] = {
    "stepping": "changing the weights to step",
    "measuring": "measuring step",
    "paused": "paused at step",
    "withdrawing": "rolling back from step",
    "ended": "ended at step",
}
PREFIX = "nereid_rollout_"
# Of each metric.
LABELS = ("route", "candidate")
METRICS = {
    "active": ("gauge", "1 while a rollout of the route is active."),
    "paused": ("gauge", "1 while the rollout is paused."),
    "share": ("gauge", "Part of the traffic that the candidate has in this step, 0 to 1."),
    "step": ("gauge", "Number of the step, from 0."),
    "step_seconds": ("gauge", "Measured time of this step."),
    "candidate_requests": ("gauge", "Requests of the candidate in this step."),
}


def describe(state: State) -> str:
    """Return the state of a rollout as one sentence."""
    result = f"{state.result}, " if state.phase == "ended" else ""
    text = f"rollout {state.number} of {state.plan.candidate}: {result}{WORDS[state.phase]} {state.step_name}"
    if state.phase == "measuring":
        text += f", after {state.elapsed_s:.0f} s"
    details = [*state.reasons, *([f"waiting: {state.waiting}"] if state.waiting else ())]
    return f"{text}: {'; '.join(details)}" if details else text


def metrics(repository: Path) -> str:
    """Return the samples of all active rollouts in Prometheus' text format; nothing without one."""
    try:
        states = active_rollouts(repository)
    except (OperationFailed, OSError):  # the controller logs it
        return ""
    samples: dict[tuple[str, Labels], float] = {
        (name, (("route", route), ("candidate", state.plan.candidate))): value
        for route, state in states.items()
        for name, value in _values(state).items()
    }
    return render(samples, PREFIX, METRICS) if samples else ""


def _values(state: State) -> dict[str, float]:
    tallies = state.look.events.values() if state.look else ()
    return {
        "active": 1.0,
        "paused": float(state.phase == "paused"),
        "share": state.share,
        "step": float(state.step),
        "step_seconds": state.elapsed_s,
        "candidate_requests": float(max((candidate.requests for candidate, _ in tallies), default=0)),
    }
