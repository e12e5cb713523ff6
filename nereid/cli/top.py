"""`nereid top`: a live view of a running server."""

import contextlib
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from nereid.base.assets import REPOSITORY
from nereid.base.errors import OperationFailed, no_server
from nereid.base.processes import exit_on_sigterm
from nereid.base.units import format_bytes, format_duration
from nereid.cli.options import Repository, environment
from nereid.cli.server_options import find_server
from nereid.cli.tables import console
from nereid.server import run_dir

if TYPE_CHECKING:
    from nereid.insight.observe.top import (
        ServerReading,
        Top,
        TopGateway,
        TopModel,
        TopRoute,
        TopServer,
    )

# The routes send their counts to Triton's metrics page every half second.
MIN_INTERVAL_S = 0.5
# Digits after the point in JSON.
DIGITS = 6
QUIT = ("q", "Q")
UNKNOWN = "-"
BARS = " ▁▂▃▄▅▆▇█"
# More cores than this are shown as bars; more than fit on a line, as their mean.
MAX_NUMBERS, MAX_BARS = 8, 64
# Width in columns from which a terminal shows more.
WIDE = 100
# Minimum length of a shortened name.
MIN_NAME = 8


def top(
    context: typer.Context,
    interval: Annotated[
        float, typer.Option(help="Seconds between two measurements.", min=MIN_INTERVAL_S)
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Measure once, print the tables, and exit; needs no terminal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one measurement as JSON, and exit.")] = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Show the traffic, the models and the processes of a running server, continuously updated.

    Press `q` or Ctrl-C to quit. Rates and quantiles are for the last interval.
    """
    from nereid.insight.observe.top import measure, read_server

    run_root, terminal = run_dir.root(environment(context)), console()

    def read() -> "ServerReading":
        return read_server(run_root, repository, find_server(context, repository))

    before = _readable(read(), repository)
    if not (once or as_json) and terminal.is_terminal and not terminal.is_dumb_terminal:
        _live(before, read, repository, interval, terminal)
        return
    time.sleep(interval)
    measured = measure(before, _readable(read(), repository))
    if as_json:
        rounded = json.loads(
            json.dumps(asdict(measured)), parse_float=lambda text: round(float(text), DIGITS)
        )
        print(json.dumps(rounded))
    else:
        terminal.print(view(measured, terminal.width))


def _readable(reading: "ServerReading", repository: Path) -> "ServerReading":
    if reading.server is None:
        raise no_server(repository)
    if reading.server.trouble:
        raise OperationFailed(reading.server.trouble)
    return reading


def _live(
    before: "ServerReading",
    read: "Callable[[], ServerReading]",
    repository: Path,
    interval_s: float,
    terminal: Console,
) -> None:
    from rich.live import Live

    from nereid.insight.observe.top import measure

    first = Text(f"measuring for {interval_s:g} s …")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for programs behind `&`
    try:
        with (
            exit_on_sigterm(),
            _open_keys(sys.stdin) as key,
            Live(first, console=terminal, screen=True, auto_refresh=False) as live,
        ):
            while key(interval_s) not in QUIT:
                after = read()
                if after.server:
                    footer = f"every {interval_s:g} s; q quits"
                    live.update(view(measure(before, after), *terminal.size, footer), refresh=True)
                else:
                    text = f"no server is running for '{repository}'; waiting for one, q quits"
                    live.update(Text(text), refresh=True)
                before = after
    except KeyboardInterrupt:
        pass


@contextlib.contextmanager
def _open_keys(stream: IO[str]) -> Iterator[Callable[[float], str]]:
    """Yield a function that waits the given seconds for a key and returns it, or "" if none came.

    Keys are neither echoed nor buffered until Enter; Ctrl-C is still a signal. Without a terminal there are
    no keys, and once the terminal is closed, the function returns `q`.
    """
    if not stream.isatty():
        yield _sleep
        return
    number = stream.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield lambda seconds: _key(number, seconds)
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _key(number: int, seconds: float) -> str:
    if not select.select([number], [], [], seconds)[0]:
        return ""
    return os.read(number, 1).decode(errors="replace") or "q"


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, and the width of terminal from which it is shown."""

    heading: str
    width: int = 0
    is_number: bool = True


ROUTES = (
    Column("route", is_number=False),
    Column("variant", is_number=False),
    *map(Column, ("weight", "seen", "req/s", "err/s", "p50 ms", "p99 ms")),
    Column("breaker", is_number=False),
    Column("agree"),
    Column("model", width=WIDE, is_number=False),
)
MODELS = (
    Column("model", is_number=False),
    *map(Column, ("ver", "inst", "req/s", "queue ms", "comp ms", "batch", "pend", "cpu %", "memory")),
)
Row = tuple[str, ...]


def view(top: "Top", width: int, height: int | None = None, footer: str = "") -> RenderableType:
    """Return the screen; idle models that do not fit into `height` lines are omitted; None is unlimited."""
    lines = [*_server_lines(top.server), *_machine_lines(top), *_gateway_lines(top.gateways, width)]
    lines += [Text(note, style="yellow") for note in top.notes]
    parts: list[RenderableType] = [_flat(line) for line in lines]
    used = len(lines) + bool(footer)
    rows = [row for route in top.routes for row in _route_rows(route)]
    if rows:
        parts += [Text(), _table(ROUTES, rows, width)]
        used += 2 + len(rows)
    if top.models:
        models, note = _models_that_fit(top.models, None if height is None else height - used - 2)
        parts += [Text(), _table(MODELS, [*map(_model_row, models)], width)]
        parts += [Text(note, style="dim")] if note else []
    elif top.seconds is None:
        parts += [Text(), Text("no rates yet: the server was not readable before", style="yellow")]
    if footer:
        parts.append(_flat(Text(footer, style="dim")))
    return Group(*parts)


def _table(columns: Sequence[Column], rows: Sequence[Row], width: int) -> Table:
    """Return a table of the columns that fit the terminal and have a text in some row."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    texts = list(zip(*rows, strict=True)) or [()] * len(columns)
    shown = [index for index, column in enumerate(columns) if column.width <= width and any(texts[index])]
    widths = {index: max(map(len, (columns[index].heading, *texts[index]))) for index in shown}
    # Numbers keep their width; the longest names are cut.
    names = [index for index in shown if not columns[index].is_number]
    while sum(widths.values()) + len(widths) - 1 > width and max(widths[index] for index in names) > MIN_NAME:
        widths[max(names, key=lambda index: widths[index])] -= 1
    for index, column_width in widths.items():
        side: Literal["left", "right"] = "right" if columns[index].is_number else "left"
        table.add_column(
            columns[index].heading, justify=side, no_wrap=True, overflow="ellipsis", width=column_width
        )
    for row in rows:
        table.add_row(*(Text(row[index]) for index in shown))  # Text: a name may look like markup
    return table


def _models_that_fit(models: "Sequence[TopModel]", lines: int | None) -> "tuple[Sequence[TopModel], str]":
    """Return the models that fit into `lines`, the busiest first if not all do, and a note."""
    if lines is None or len(models) <= lines:
        return models, ""
    count = max(1, lines - 1)
    busiest = sorted(models, key=lambda model: -model.requests_per_s)[:count]
    return busiest, f"… {len(models) - count} more models with fewer requests"


def _route_rows(route: "TopRoute") -> Iterator[Row]:
    for variant in route.variants:
        latencies = _number(variant.p50_ms), _number(variant.p99_ms)
        rates = _rate(variant.requests_per_s), _rate(variant.errors_per_s)
        share, about = _percent(variant.share), (variant.breaker or UNKNOWN, "", variant.model or UNKNOWN)
        yield route.name, variant.name, _percent(variant.expected_share), share, *rates, *latencies, *about
    for shadow in route.shadows:
        name, rate = f"{shadow.name} (shadow)", _rate(shadow.requests_per_s)
        agreement = _percent(shadow.agreement)
        yield route.name, name, f"{shadow.percent:g} %", "", rate, "", "", "", "", agreement, ""


def _model_row(model: "TopModel") -> Row:
    return (
        model.name,
        str(model.version),
        _whole(model.instances),
        _rate(model.requests_per_s),
        _number(model.queue_ms),
        _number(model.compute_ms),
        _number(model.batch_size),
        _whole(model.pending),
        _whole(model.cpu_percent),
        _bytes(model.memory_bytes),
    )


def _server_lines(server: "TopServer") -> list[Text]:
    ports = " ".join(f"{name} {port}" for name, port in server.ports.items())
    uptime = "" if server.uptime_s is None else f"  up {format_duration(server.uptime_s)}"
    state = {True: ("ready", "green"), False: ("not ready", "bold red"), None: ("running", "")}[server.ready]
    first = Text.assemble(state, f"{uptime}  profile {server.profile}  {server.host} {ports}")
    reasons = [Text(f"  {part}: {reason}", style="red") for part, reason in server.not_ready.items()]
    return [first, *reasons]


def _machine_lines(top: "Top") -> list[Text]:
    machine, lines = top.machine, list[Text]()
    if machine:
        load = " ".join(f"{value:.2f}" for value in machine.load)
        used = format_bytes(machine.memory_total_bytes - machine.memory_available_bytes)
        total = format_bytes(machine.memory_total_bytes)
        limits = [
            *([f"{machine.limit_cores:g} cores"] if machine.limit_cores is not None else ()),
            *([format_bytes(machine.limit_memory_bytes)] if machine.limit_memory_bytes is not None else ()),
        ]
        limit = f"  limit {', '.join(limits)}" if limits else ""
        cores = _cores(machine.cores_busy)
        lines.append(Text(f"cpu {cores}  load {load}  memory {used} of {total}{limit}"))
        lines += [
            Text(
                f"gpu {gpu.uuid[:12]}  {_percent(gpu.busy)}  memory {_bytes(gpu.memory_used_bytes)} of "
                f"{_bytes(gpu.memory_total_bytes)}  {_whole(gpu.power_w)} W"
            )
            for gpu in machine.gpus
        ]
    models = {model.name for model in top.models}
    processes = [
        f"{process.name} {process.cpu_percent:.0f} % {format_bytes(process.memory_bytes)}"
        for process in top.processes
        if process.name not in models
    ]
    if processes:
        lines.append(Text(f"processes {', '.join(processes)}"))
    for route in top.routes:
        if rollout := route.rollout:
            state = f"{rollout.phase} at step {rollout.step}"
            lines.append(Text(f"rollout of {rollout.candidate} on {route.name}: {state}", style="cyan"))
    return lines


def _gateway_lines(gateways: "Sequence[TopGateway]", width: int) -> list[Text]:
    lines = []
    for gateway in gateways:
        text = f"gateway {gateway.port}  "
        if gateway.trouble:
            lines.append(Text(f"{text}{gateway.trouble}"))
            continue
        text += f"{_rate(gateway.requests_per_s)} req/s  p99 {_number(gateway.p99_ms)} ms  "
        text += f"in flight {_whole(gateway.in_flight)} of {_whole(gateway.limit)}  "
        text += f"waiting {_whole(gateway.waiting)}  shed {_rate(gateway.shed_per_s)}/s"
        if width >= WIDE:
            text += f"  cpu {gateway.cpu_percent:.0f} %  {format_bytes(gateway.memory_bytes)}"
        lines.append(Text(text))
    return lines


def _cores(busy: Sequence[float]) -> str:
    if len(busy) <= MAX_NUMBERS:
        return " ".join(f"{share * 100:.0f}" for share in busy) + " %"
    mean = f"{sum(busy) / len(busy) * 100:.0f} %"
    if len(busy) > MAX_BARS:
        return f"{mean} of {len(busy)} cores"
    return "".join(BARS[round(share * (len(BARS) - 1))] for share in busy) + f" {mean}"


def _flat(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _bytes(count: float | None) -> str:
    return UNKNOWN if count is None else format_bytes(int(count))


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share * 100:.0f} %"


def _rate(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}" if value < 100_000 else f"{value / 1000:.0f}k"


def _number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _whole(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"
