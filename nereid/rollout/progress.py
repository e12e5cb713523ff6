"""The state of rollouts for people and for Prometheus."""

from pathlib import Path

from nereid.errors import OperationFailed
from nereid.rollout.rollout_journal import Phase, State, active_rollouts

WORDS: dict[Phase, str] = {
    "stepping": "changing the weights to step",
    "measuring": "measuring step",
    "paused": "paused at step",
    "withdrawing": "rolling back from step",
    "ended": "ended at step",
}
PREFIX = "nereid_rollout_"
METRICS = {
    "active": "1 while a rollout of the route is active.",
    "paused": "1 while the rollout is paused.",
    "share": "Part of the traffic that the candidate has in this step, 0 to 1.",
    "step": "Number of the step, from 0.",
    "step_seconds": "Measured time of this step.",
    "candidate_requests": "Requests of the candidate in this step.",
}


def describe(state: State) -> str:
    """Return the state of a rollout as one sentence."""
    result = f"{state.result}, " if state.phase == "ended" else ""
    text = f"rollout {state.number} of {state.plan.candidate}: {result}{WORDS[state.phase]} {state.step_name}"
    if state.phase == "measuring":
        text += f", after {state.elapsed_s:.0f} s"
    return f"{text}: {'; '.join(state.reasons)}" if state.reasons else text


def metrics(repository: Path) -> str:
    """Return the samples of all active rollouts in Prometheus' text format; nothing without one."""
    try:
        states = active_rollouts(repository)
    except (OperationFailed, OSError):  # the controller logs it
        return ""
    if not states:
        return ""
    lines = []
    for name, text in METRICS.items():
        lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} gauge"]
        for route, state in states.items():
            labels = f'route="{route}",candidate="{state.plan.candidate}"'
            lines.append(f"{PREFIX}{name}{{{labels}}} {_value(name, state):.15g}")
    return "\n".join(lines) + "\n"


def _value(name: str, state: State) -> float:
    requests = max((pair[0].requests for pair in state.look.events.values()), default=0) if state.look else 0
    values = {
        "active": 1.0,
        "paused": float(state.phase == "paused"),
        "share": state.share,
        "step": float(state.step),
        "step_seconds": state.elapsed_s,
        "candidate_requests": float(requests),
    }
    return values[name]
