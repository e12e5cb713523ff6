"""`nereid rollout`: shift traffic to a candidate step by step while its measurements are good enough."""

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from nereid.application.chosen_models import changeable_repository
from nereid.base.assets import REPOSITORY
from nereid.base.errors import WrongUsage
from nereid.cli.options import AsJson, Repository, complete_variant, show_progress
from nereid.cli.route import RouteName
from nereid.cli.server_options import find_server, with_server
from nereid.cli.tables import print_table

if TYPE_CHECKING:  # each command imports what it needs, so that the others start faster
    from nereid.models.rollout.commands import Command, Forecast
    from nereid.models.rollout.plan import RolloutPlan
    from nereid.models.rollout.rollout_journal import Rollout, RolloutEvent
    from nereid.models.routes.location import RouteLocation

app = typer.Typer(
    help="Shift traffic to a candidate step by step, and roll back if it is worse than the control."
)
STOP_POLL_S = 0.2


def planned(text: str, default: str) -> Any:
    """Return an option that overrides a value of the plan, for `Annotated`; `default` is the plan's."""
    return typer.Option(help=text, show_default=default)


Candidate = Annotated[
    str,
    typer.Argument(
        help="Variant to shift the traffic to.",
        metavar="VARIANT",
        show_default="from --file",
        autocompletion=complete_variant,
    ),
]
PlanFile = Annotated[
    Path | None, typer.Option("--file", help="Plan as JSON; options override its values.", metavar="FILE")
]
Steps = Annotated[str | None, planned("Traffic percentages; the first may be `shadow`.", "1,5,25,50,100")]
HoldS = Annotated[float | None, planned("Minimum duration of a step, in seconds.", "60")]
PatienceS = Annotated[
    float | None, planned("Seconds after which a step without a decision is inconclusive.", "3600")
]
MinRequests = Annotated[int | None, planned("Candidate requests needed before a step may pass.", "100")]
MaxErrorRatio = Annotated[
    float | None, planned("Maximum fraction of the candidate's requests that fail, 0 to 1.", "0.05")
]
SloMs = Annotated[
    float | None,
    planned("Latency in milliseconds above which a request is slow.", "1.2 times the control's median"),
]
MaxLatencyIncrease = Annotated[
    float | None,
    planned("Increase in median latency that fails a step at its end; 0.2 means 20 %.", "0.2"),
]
MaxDisagreement = Annotated[
    float | None,
    planned("Maximum fraction of shadow responses that fail or disagree, 0 to 1.", "0.05"),
]
IfInconclusive = Annotated[
    str | None, planned("What to do after an inconclusive step: `pause` or `rollback`.", "pause")
]
Reason = Annotated[str, typer.Option(help="Reason to record in the history.")]


def _plan(file: Path | None, options: dict[str, Any]) -> "RolloutPlan":
    """Return the plan from a file, overridden by the command's options."""
    from nereid.models.rollout.plan import RolloutPlan, make_plan, parse_plan, read_steps

    values: dict[str, Any] = {}
    if file:
        try:
            values = msgspec.to_builtins(parse_plan(file.read_bytes(), str(file)))
        except OSError as error:
            raise WrongUsage(f"cannot read '{file}': {error.strerror}") from None
    for name in options.keys() & {*RolloutPlan.__struct_fields__}:
        if (value := options[name]) not in (None, ""):
            values[name] = read_steps(value) if name == "steps" else value
    if "candidate" not in values:
        raise WrongUsage("no candidate: expected VARIANT, or a plan with a candidate in --file")
    if "hold_s" in values and "patience_s" not in values:
        values["patience_s"] = max(3600.0, values["hold_s"])
    return make_plan(**values)


@app.command()
@with_server
def start(
    context: typer.Context,
    candidate: Candidate = "",
    file: PlanFile = None,
    steps: Steps = None,
    hold_s: HoldS = None,
    patience_s: PatienceS = None,
    min_requests: MinRequests = None,
    max_error_ratio: MaxErrorRatio = None,
    slo_ms: SloMs = None,
    max_latency_increase: MaxLatencyIncrease = None,
    max_disagreement: MaxDisagreement = None,
    if_inconclusive: IfInconclusive = None,
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Start a rollout; `nereid serve`, or `nereid rollout controller`, carries it out.

    Every second, the candidate is compared with the variant that currently has the traffic. A step passes
    once the counts show that the candidate is not worse; if they show that it is worse, the rollout rolls
    back.
    """
    from nereid.models.rollout import commands

    plan = _plan(file, context.params)
    location = _location(repository, route)
    state = commands.start(location, plan, find_server(context, changeable_repository(repository)))
    print(f"{location.name}: rollout {state.number} of {plan.candidate} starts with step {state.step_name}")
    _note_controller(location)


@app.command("plan")
@with_server
def plan_rollout(
    context: typer.Context,
    candidate: Candidate = "",
    file: PlanFile = None,
    steps: Steps = None,
    hold_s: HoldS = None,
    min_requests: MinRequests = None,
    slo_ms: SloMs = None,
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Measure the traffic for ten seconds and show what each step needs; nothing is changed."""
    from nereid.models.rollout import commands

    location, server_info = _location(repository, route), find_server(context, repository)
    _print_forecast(commands.forecast(location, _plan(file, context.params), server_info))


@app.command()
def status(as_json: AsJson = False, route: RouteName = "", repository: Repository = REPOSITORY) -> None:
    """Show the route's newest rollout, and what it is waiting for."""
    from nereid.models.rollout.rollout_journal import RolloutJournals

    state = RolloutJournals.of(_location(repository, route)).latest()
    if as_json:
        print(msgspec.json.encode(state).decode())
    else:
        print(state or "no rollout yet; start one: nereid rollout start VARIANT")


@app.command()
def pause(reason: Reason = "", route: RouteName = "", repository: Repository = REPOSITORY) -> None:
    """Hold the current weights and make no decisions."""
    _issue("pause", reason, route, repository)


@app.command()
def resume(reason: Reason = "", route: RouteName = "", repository: Repository = REPOSITORY) -> None:
    """Restart the current step of a paused rollout, counting from zero."""
    _issue("resume", reason, route, repository)


@app.command()
def promote(reason: Reason = "", route: RouteName = "", repository: Repository = REPOSITORY) -> None:
    """Skip to the last step: the candidate gets all traffic, and its own limits still apply."""
    _issue("promote", reason, route, repository)


@app.command()
@with_server
def abort(
    context: typer.Context, reason: Reason = "", route: RouteName = "", repository: Repository = REPOSITORY
) -> None:
    """Roll back and end the rollout; the candidate stays loaded."""
    from nereid.models.rollout import commands

    _issue("abort", reason, route, repository)
    location = _location(repository, route)
    state = commands.finish(location, lambda: find_server(context, repository), show_progress)
    print(f"{location.name}: rollout {state.number} is {state.result}")


@app.command()
def history(
    number: Annotated[
        int | None,
        typer.Argument(
            help="Number of the rollout to show.", metavar="NUMBER", min=1, show_default="all rollouts"
        ),
    ] = None,
    as_json: AsJson = False,
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """List the route's rollouts, newest first, or all events of one rollout."""
    from nereid.models.rollout.rollout_journal import RolloutJournals

    logs = RolloutJournals.of(_location(repository, route))
    if number is None:
        _print_rollouts([state for entry in logs.numbers() if (state := logs.read(entry))], as_json)
        return
    if number not in logs.numbers():
        known = ", ".join(map(str, logs.numbers())) or "none"
        raise WrongUsage(f"unknown rollout {number}: expected one of {known}")
    _print_events(logs.journal(number).read(), as_json)


@app.command()
@with_server
def controller(context: typer.Context, repository: Repository = REPOSITORY) -> None:
    """Carry out the rollouts of a server that `nereid serve` did not start, until Ctrl-C."""
    from nereid.base.processes import StopFlag, in_background
    from nereid.models.rollout import service
    from nereid.models.rollout.controller import POLL_S
    from nereid.models.routes.location import check_repository

    check_repository(changeable_repository(repository))
    find_server(context, repository)  # an invalid --server fails here
    stop = StopFlag()
    run = partial(service.run, repository, lambda: find_server(context, repository), log=show_progress)
    with in_background("rollouts", run, POLL_S + 1):
        show_progress(f"controller of the rollouts of '{repository}' started")
        while not stop.is_set():
            time.sleep(STOP_POLL_S)


def _issue(action: "Command", reason: str, route: str, repository: Path) -> None:
    from nereid.models.rollout import commands

    location = _location(changeable_repository(repository), route)
    state = commands.issue(location, action, reason)
    print(f"{location.name}: {state}")
    if action in ("resume", "promote"):
        _note_controller(location)


def _note_controller(location: "RouteLocation") -> None:
    from nereid.models.rollout import commands

    if not commands.wait_controlled(location):
        text = "no controller is running yet; fix: nereid serve, or nereid rollout controller"
        show_progress(f"note: {text}")


def _location(repository: Path, route: str) -> "RouteLocation":
    from nereid.models.routes.location import find_route

    return find_route(repository, route)


def _print_rollouts(rollouts: "Sequence[Rollout]", as_json: bool) -> None:
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


def _print_events(events: "Sequence[RolloutEvent]", as_json: bool) -> None:
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


def _print_forecast(forecasts: "Sequence[Forecast]") -> None:
    rows = [
        (
            forecast.step,
            f"{forecast.requests:,}" if forecast.requests else "—",
            "unknown (no traffic)" if math.isinf(forecast.seconds) else f"{forecast.seconds:,.0f} s",
            forecast.limited_by,
        )
        for forecast in forecasts
    ]
    print_table("step", "requests of all callers, about", "minimum duration", "limited by", rows=rows)


def _time(when: object) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S}"
