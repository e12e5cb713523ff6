"""The screen of `nereid top`: lines and tables for a terminal of any width from 80 columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nereid.base.units import format_bytes, format_duration
from nereid.insight.observe.top import Top, TopGateway, TopModel, TopRoute, TopServer

UNKNOWN = "-"
BARS = " ▁▂▃▄▅▆▇█"
# More cores than this are shown as bars, and more than can be seen in a line as their mean.
MAX_NUMBERS, MAX_BARS = 8, 64
# Columns from which a terminal shows more.
WIDE = 100
# Letters that are left of a name.
MIN_NAME = 8


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


def view(top: Top, width: int, height: int | None = None, footer: str = "") -> RenderableType:
    """Return the screen.

    Args:
        top: the values.
        width: columns of the terminal.
        height: lines of the terminal, for which idle models are left out; None for all.
        footer: the last line.
    """
    lines = [*_server_lines(top.server), *_machine_lines(top), *_gateway_lines(top.gateways, width)]
    lines += [Text(note, style="yellow") for note in top.notes]
    parts: list[RenderableType] = [_flat(line) for line in lines]
    used = len(lines) + bool(footer)
    rows = [row for route in top.routes for row in _route_rows(route)]
    if rows:
        parts += [Text(), _table(ROUTES, rows, width)]
        used += 2 + len(rows)
    if top.models:
        models, note = _fitting(top.models, None if height is None else height - used - 2)
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
    shown = [place for place, each in enumerate(columns) if each.width <= width and any(texts[place])]
    widths = {place: max(map(len, (columns[place].heading, *texts[place]))) for place in shown}
    # Numbers keep their width; the longest names are cut.
    names = [place for place in shown if not columns[place].is_number]
    while sum(widths.values()) + len(widths) - 1 > width and max(widths[each] for each in names) > MIN_NAME:
        widths[max(names, key=lambda place: widths[place])] -= 1
    for place, most in widths.items():
        side: Literal["left", "right"] = "right" if columns[place].is_number else "left"
        table.add_column(columns[place].heading, justify=side, no_wrap=True, overflow="ellipsis", width=most)
    for row in rows:
        table.add_row(*(Text(row[place]) for place in shown))  # Text: a name may look like markup
    return table


def _fitting(models: Sequence[TopModel], lines: int | None) -> tuple[Sequence[TopModel], str]:
    """Return the models that fit into some lines, the busiest first if not all do, and a note."""
    if lines is None or len(models) <= lines:
        return models, ""
    kept = max(1, lines - 1)
    busiest = sorted(models, key=lambda each: -each.requests_per_s)[:kept]
    return busiest, f"… {len(models) - kept} more models with fewer requests"


def _route_rows(route: TopRoute) -> Iterator[Row]:
    for each in route.variants:
        latencies = _number(each.p50_ms), _number(each.p99_ms)
        rates = _rate(each.requests_per_s), _rate(each.errors_per_s)
        seen, about = _percent(each.share), (each.breaker or UNKNOWN, "", each.model or UNKNOWN)
        yield route.name, each.name, _percent(each.expected_share), seen, *rates, *latencies, *about
    for shadow in route.shadows:
        name, rate = f"{shadow.name} (shadow)", _rate(shadow.requests_per_s)
        agreement = _percent(shadow.agreement)
        yield route.name, name, f"{shadow.percent:g} %", "", rate, "", "", "", "", agreement, ""


def _model_row(model: TopModel) -> Row:
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


def _server_lines(server: TopServer) -> list[Text]:
    ports = " ".join(f"{name} {port}" for name, port in server.ports.items())
    uptime = "" if server.uptime_s is None else f"  up {format_duration(server.uptime_s)}"
    state = {True: ("ready", "green"), False: ("not ready", "bold red"), None: ("running", "")}[server.ready]
    first = Text.assemble(state, f"{uptime}  profile {server.profile}  {server.host} {ports}")
    reasons = [Text(f"  {part}: {reason}", style="red") for part, reason in server.not_ready.items()]
    return [first, *reasons]


def _machine_lines(top: Top) -> list[Text]:
    machine, lines = top.machine, []
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
                f"gpu {each.uuid[:12]}  {_percent(each.busy)}  memory {_bytes(each.memory_used_bytes)} of "
                f"{_bytes(each.memory_total_bytes)}  {_whole(each.power_w)} W"
            )
            for each in machine.gpus
        ]
    models = {each.name for each in top.models}
    own = [each for each in top.processes if each.name not in models]
    if own:
        texts = (f"{each.name} {each.cpu_percent:.0f} % {format_bytes(each.memory_bytes)}" for each in own)
        lines.append(Text("processes " + ", ".join(texts)))
    lines += [_rollout_line(route) for route in top.routes]
    return [line for line in lines if line]


def _rollout_line(route: TopRoute) -> Text:
    if not (found := route.rollout):
        return Text()
    state = f"{found.phase} at step {found.step}"
    return Text(f"rollout of {found.candidate} on {route.name}: {state}", style="cyan")


def _gateway_lines(gateways: Sequence[TopGateway], width: int) -> list[Text]:
    lines = []
    for each in gateways:
        text = f"gateway {each.port}  "
        if each.trouble:
            lines.append(Text(f"{text}{each.trouble}"))
            continue
        text += f"{_rate(each.requests_per_s)} req/s  p99 {_number(each.p99_ms)} ms  "
        text += (
            f"in flight {_whole(each.in_flight)} of {_whole(each.limit)}  waiting {_whole(each.waiting)}  "
        )
        text += f"shed {_rate(each.shed_per_s)}/s"
        if width >= WIDE:
            text += f"  cpu {each.cpu_percent:.0f} %  {format_bytes(each.memory_bytes)}"
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
