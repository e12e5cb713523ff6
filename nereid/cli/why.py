"""`nereid why`: why requests were slow or failed."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nereid.base.assets import REPOSITORY
from nereid.base.errors import OperationFailed, no_server, value_errors_as_wrong_usage
from nereid.base.units import format_bytes, format_duration, format_ms, parse_duration
from nereid.cli.options import AsJson, Repository, complete_model, environment
from nereid.cli.server_options import find_server
from nereid.server import run_dir
from nereid.server.run_dir import ServerInfo

if TYPE_CHECKING:
    from nereid.insight.observe.contention import Contention
    from nereid.insight.observe.why import Diagnosis

BAR_WIDTH = 30
MEASUREMENT_S = 2.0


def why(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Show only requests to this route or model.",
            metavar="MODEL",
            show_default="all requests",
            autocompletion=complete_model,
        ),
    ] = None,
    window: Annotated[str, typer.Option("--since", help="How far back to look.", metavar="DURATION")] = "5m",
    request: Annotated[
        str | None,
        typer.Option(help="Show the stages of one request, by its request id or trace id.", metavar="ID"),
    ] = None,
    as_json: AsJson = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Show why the last requests of a running server were slow or failed, and what to try next.

    The stages of the slowest 5 % of requests are compared with those of typical ones. Kernel counters of the
    server's processes are sampled for two seconds.
    """
    from nereid.insight.observe.why import explain, recorded_requests

    with value_errors_as_wrong_usage("--since: "):
        window_s = parse_duration(window)
    server_info = find_server(context, repository)
    if server_info is None:
        raise no_server(repository)
    if request:
        matches = [
            line
            for line in recorded_requests(server_info)
            if request in (line["request_id"], line["trace_id"])
        ]
        _show_request(matches, request, as_json)
        return
    lines = [
        line
        for line in recorded_requests(server_info, time.time() - window_s)
        if model is None or model in (line.get("route"), line.get("model"))
    ]
    run_root = run_dir.root(environment(context))
    contention = _measure(
        server_info, [gateway.pid for gateway in run_dir.find_gateways(run_root, repository)]
    )
    diagnosis = explain(lines, contention, server_info.objective_ms)
    if as_json:
        print(json.dumps({**asdict(diagnosis), "contention": asdict(contention)}))
    else:
        _show(diagnosis, contention, window_s)


def _measure(server_info: ServerInfo, gateways: Sequence[int]) -> "Contention":
    from nereid.insight.observe import contention
    from nereid.server.supervision.process_usage import parent_of

    supervisor = parent_of(server_info.pid)
    roots = [*gateways, *([supervisor] if supervisor > 1 else [])]
    before = contention.read(server_info.pid, roots)
    time.sleep(MEASUREMENT_S)
    return contention.between(before, contention.read(server_info.pid, roots))


def _show(diagnosis: "Diagnosis", contention: "Contention", window_s: float) -> None:
    failed = ", ".join(f"{count:,} {name}" for name, count in diagnosis.outcomes.items())
    print(
        f"last {format_duration(window_s)}: {diagnosis.requests:,} requests"
        f"{f', failed: {failed}' if failed else ''}"
        f"; median {format_ms(diagnosis.p50_ms)}, 99th percentile {format_ms(diagnosis.p99_ms)}"
    )
    if diagnosis.slow_ms:
        print(f"\n{'stage':<10} {'typical':>10} {'slowest 5 %':>12}  difference")
        typical_ms = {name: diagnosis.typical_ms.get(name, 0.0) for name in diagnosis.slow_ms}
        max_ms = max(1e-9, *(slow - typical_ms[name] for name, slow in diagnosis.slow_ms.items()))
        for name, slow in diagnosis.slow_ms.items():
            typical = typical_ms[name]
            bar = "█" * round(BAR_WIDTH * max(0.0, slow - typical) / max_ms)
            print(f"{name:<10} {format_ms(typical):>10} {format_ms(slow):>12}  {slow - typical:+8.1f} {bar}")
        sizes = " and ".join(format_bytes(round(size)) for size in diagnosis.image_bytes)
        waits = " and ".join(format_ms(wait) for wait in diagnosis.core_wait_ms)
        print(f"image size {sizes}; models waited {waits} for a core")
        if diagnosis.slow_variant:
            print(f"nearly all of the slowest requests were served by variant '{diagnosis.slow_variant}'")
    print(
        f"\nnow: the server uses {contention.own_cores:.1f} of {contention.cores} cores, other programs "
        f"{contention.other_cores:.1f}; {contention.wait_ratio:.2f} s of waiting for each second of work, "
        f"{contention.faults_per_s:,.0f} page faults/s, {contention.switches_per_s:,.0f} involuntary context "
        f"switches/s, throttled {contention.throttled:.0%}"
    )
    name = diagnosis.cause or "nothing unusual"
    print(f"\ncause: {name}: {diagnosis.why}\ntry:   {diagnosis.next_step}")


def _show_request(lines: list[dict[str, Any]], name: str, as_json: bool) -> None:
    """Print the stages of one request.

    Raises:
        OperationFailed: no request has this id.
    """
    if not lines:
        raise OperationFailed(f"no recorded request has the id '{name}'; only the newest are kept")
    for line in lines:
        if as_json:
            print(json.dumps(line))
            continue
        rest = {key: value for key, value in line.items() if key not in ("stages_ms", "ms")}
        for key, value in rest.items():
            print(f"{key:<14} {value if isinstance(value, str) else json.dumps(value)}")
        print(f"{'total':<14} {format_ms(line['ms'])}")
        for stage, value in line["stages_ms"].items():
            bar = "█" * round(BAR_WIDTH * value / max(line["ms"], 1e-9))
            print(f"  {stage:<12} {format_ms(value):>10} {bar}")
    sys.stdout.flush()
