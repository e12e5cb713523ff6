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
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from nereid.base.assets import REPOSITORY
from nereid.base.errors import OperationFailed
from nereid.cli.options import Repository, environment
from nereid.cli.server_options import find_server
from nereid.cli.tables import console

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nereid.insight.observe.top import Reading, TopReader

# The routes send their counts to Triton's metrics page every half second.
MIN_INTERVAL_S = 0.5
# Digits after the point in JSON.
DIGITS = 6
QUIT = ("q", "Q")


def top(
    context: typer.Context,
    interval: Annotated[
        float, typer.Option(help="Seconds between two measurements.", min=MIN_INTERVAL_S)
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Measure once, print the tables, and end; also without a terminal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one measurement as JSON, and end.")] = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Show the traffic, the models and the processes of a running server, again and again.

    The keys `q` and Ctrl-C end the view. Rates and quantiles are those of the last interval.
    """
    from nereid.insight.observe.top import TopReader
    from nereid.server import run_dir

    base = run_dir.root(environment(context))
    reader = TopReader(base, repository, lambda: find_server(context, repository))
    terminal = console()
    if once or as_json or not terminal.is_terminal or terminal.is_dumb_terminal:
        _once(reader, interval, as_json)
    else:
        _live(reader, interval)


def _once(reader: "TopReader", interval_s: float, as_json: bool) -> None:
    from nereid.cli.observe_commands.top_view import view
    from nereid.insight.observe.top import measure

    before = _readable(reader)
    time.sleep(interval_s)
    found = measure(before, _readable(reader))
    if as_json:
        print(json.dumps(_rounded(asdict(found))))
    else:
        terminal = console()
        terminal.print(view(found, terminal.width))


def _readable(reader: "TopReader") -> "Reading":
    reading = reader.read()
    if reading.server is None:
        raise OperationFailed(f"no server of '{reader.repository}' runs; fix: nereid serve")
    if reading.server.trouble:
        raise OperationFailed(reading.server.trouble)
    return reading


def _live(reader: "TopReader", interval_s: float) -> None:
    from rich.live import Live
    from rich.text import Text

    from nereid.base.processes import exit_on_sigterm

    before = _readable(reader)
    terminal = console()
    first = Text(f"measuring for {interval_s:g} s …")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for programs behind `&`
    try:
        with (
            exit_on_sigterm(),
            _open_keys(sys.stdin) as key,
            Live(first, console=terminal, screen=True, auto_refresh=False) as live,
        ):
            while key(interval_s) not in QUIT:
                after = reader.read()
                screen = _screen(reader, before, after, terminal.size, interval_s)
                live.update(screen, refresh=True)
                before = after
    except KeyboardInterrupt:
        pass


def _screen(
    reader: "TopReader", before: "Reading", after: "Reading", size: Sequence[int], interval_s: float
) -> "RenderableType":
    from rich.text import Text

    from nereid.cli.observe_commands.top_view import view
    from nereid.insight.observe.top import measure

    if after.server is None:
        return Text(f"no server of '{reader.repository}' runs; this view waits for one, q ends it")
    width, height = size
    return view(measure(before, after), width, height, f"every {interval_s:g} s; q ends")


@contextlib.contextmanager
def _open_keys(stream: IO[str]) -> Iterator[Callable[[float], str]]:
    """Give a function that waits some seconds for a key, and returns it; empty without one.

    Keys are neither shown nor collected until Enter; Ctrl-C still is a signal. Without a terminal there are
    no keys, and after its end the function returns `q`.
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


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
