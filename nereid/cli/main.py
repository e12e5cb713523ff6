"""The table of the `nereid` commands; it reads the environment for all of them."""

import os
from collections.abc import Callable
from typing import Annotated

import typer

from nereid.cli import demo, gateway, init, keys, serve
from nereid.cli.command_group import Command, CommandGroup
from nereid.cli.drift_commands import drift
from nereid.cli.image_commands.image_command import COMMANDS
from nereid.cli.models import add, publish, remove, tune, versions, watch
from nereid.cli.observe_commands import check, doctor, status, top, why
from nereid.cli.options import reflowed, show_help
from nereid.cli.rollout_commands import rollout
from nereid.cli.route_commands import route
from nereid.cli.server_options import with_server

app = typer.Typer(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
commands: tuple[Callable[..., None], ...] = (
    demo.demo,
    init.init,
    serve.serve,
    *COMMANDS,
    gateway.gateway,
    with_server(status.status),
    with_server(top.top),
    with_server(why.why),
    with_server(add.add),
    with_server(publish.publish),
    with_server(publish.rollback),
    with_server(publish.retire),
    with_server(remove.remove),
    with_server(remove.reload),
    with_server(versions.versions),
    with_server(watch.watch),
    check.check,
    doctor.doctor,
    tune.tune,
)
for command in commands:
    app.command(cls=Command)(command)
app.add_typer(route.app, name="route")
app.add_typer(rollout.app, name="rollout")
app.add_typer(drift.app, name="drift")
app.add_typer(keys.app, name="key")
for group in (app, route.app, rollout.app, drift.app, keys.app):
    for info in group.registered_commands:
        info.help = reflowed(getattr(info.callback, "__doc__", None))


def print_version(wanted: bool) -> None:
    """Print the version of the installed distribution, and end."""
    if wanted:
        import nereid

        print(f"nereid {nereid.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=print_version)
    ] = False,
) -> None:
    """Serve image models on a real NVIDIA Triton Inference Server."""
    context.obj = os.environ
    show_help(context)


def main() -> None:
    """Run the command line."""
    app(prog_name="nereid")


if __name__ == "__main__":
    main()
