"""The picture of docs/top.md: `nereid top`, and a server and a gateway under load.

python -m loadtest.top_picture         writes docs/top.svg; `make pictures` runs it
"""

import argparse
import contextlib
import io
import os
import re
import tempfile
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType

from loadtest import servers
from loadtest.background_load import BackgroundLoad
from nereid import assets
from nereid.cli.observe_commands.top_view import view
from nereid.client.request import ProtocolName
from nereid.observe.top import measure
from nereid.observe.top_reading import TopReader
from nereid.server import run_dir

TARGET = Path(__file__).parent.parent / "docs" / "top.svg"
COLUMNS, INTERVAL_S, WARM_UP_S = 100, 5.0, 2.0
CALLERS, PAUSE_S = 4, 0.05
# The fonts would be fetched from the network; without them, a reader's own one is used.
FONTS = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)


class GatewayAddress:
    """The address of a gateway for `BackgroundLoad`; its only caller uses HTTP."""

    def __init__(self, port: int) -> None:
        self._port = port

    def url(self, protocol: ProtocolName) -> str:
        """Return HOST:PORT."""
        return f"127.0.0.1:{self._port}"


def measured() -> RenderableType:
    """Serve, load and measure; returns the screen."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = stack.enter_context(servers.supervised(assets.REPOSITORY, scratch, os.environ))
        gateway = stack.enter_context(servers.gateway_of(running))
        stack.enter_context(BackgroundLoad(running.record, "classify", CALLERS, PAUSE_S))
        stack.enter_context(BackgroundLoad(GatewayAddress(gateway.port), "classify", 1))
        time.sleep(WARM_UP_S)
        base = run_dir.root(running.environment)
        reader = TopReader(base, running.repository, lambda: running.record)
        before = reader.read()
        time.sleep(INTERVAL_S)
        return view(measure(before, reader.read()), COLUMNS, footer=f"every {INTERVAL_S:g} s; q ends")


def draw(screen: RenderableType) -> str:
    """Return a screen as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(screen)
    code_format = FONTS.sub("", CONSOLE_SVG_FORMAT)
    text = console.export_svg(title="nereid top", code_format=code_format, unique_id="nereid-top")
    return "\n".join(line.rstrip() for line in text.splitlines() if "<!--" not in line) + "\n"


def main() -> None:
    """Write the picture."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    TARGET.write_text(draw(measured()))


if __name__ == "__main__":
    main()
