"""The `nereid` commands, how each one exits, and the environment that they receive."""

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import typer
from typer._click.exceptions import ClickException  # Typer's copy of Click; not exported otherwise
from typer.core import TyperCommand, TyperGroup

from nereid.application import exit_codes
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.cli import check, demo, drift, gateway, keys, rollout, route, serve, status, top, why
from nereid.cli.image_commands.image_command import IMAGE_COMMANDS
from nereid.cli.models import add, publish, tune
from nereid.cli.options import reflow, show_help
from nereid.cli.server_options import with_server

Commands: TypeAlias = tuple[Callable[..., None], ...]
# Options that stand for the first argument of a command, by its name.
OPTIONS_OF_ARGUMENTS = {"model": ("--model", "--route"), "repository": ("--repository",)}


class Command(TyperCommand):
    """A command whose first argument may also be given as an option, as in other commands: `--model NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line."""
        first = next(
            (parameter.name for parameter in self.params if parameter.param_type_name == "argument"), ""
        )
        for index, word in enumerate(args):
            name, equals, value = word.partition("=")
            if name in OPTIONS_OF_ARGUMENTS.get(first, ()) and (equals or index + 1 < len(args)):
                rest = args[:index] + args[index + (1 if equals else 2) :]
                args = [value if equals else args[index + 1], *rest]
                break
        return list(super().parse_args(ctx, args))


class CommandGroup(TyperGroup):
    """The root of the command line: every failure ends with `error: REASON` and its exit code."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command line, and exit."""
        with exit_codes.program():
            try:
                code = super().main(*args, **options | {"standalone_mode": False})
            except typer.Abort:  # Ctrl-C at a prompt, or no terminal
                raise OperationFailed("cancelled; nothing has changed") from None
            except ClickException as error:
                context = getattr(error, "ctx", None)
                fix = f"see `{context.command_path} --help`" if context else ""
                raise WrongUsage(error.format_message().rstrip("."), fix) from None
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
SERVE: Commands = (demo.demo, demo.init, serve.serve, *IMAGE_COMMANDS, gateway.gateway)
OBSERVE: Commands = (status.status, top.top, why.why)
PUBLISH: Commands = (add.add, publish.publish, publish.rollback, publish.retire)
VERSIONS: Commands = (publish.remove, publish.reload, publish.versions, publish.watch)
CHECK: Commands = (check.check, check.doctor, tune.tune)
for command in (*SERVE, *map(with_server, OBSERVE + PUBLISH + VERSIONS), *CHECK):
    app.command(cls=Command)(command)
GROUPS = {"route": route.app, "rollout": rollout.app, "drift": drift.app, "key": keys.app}
for name, group in GROUPS.items():
    app.add_typer(group, name=name, callback=show_help, invoke_without_command=True)
for group in (app, *GROUPS.values()):
    for info in group.registered_commands:
        info.help = reflow(getattr(info.callback, "__doc__", None))


def print_version(is_requested: bool) -> None:
    """Print the version of the installed distribution, and exit."""
    if is_requested:
        from importlib.metadata import version

        print(f"nereid {version('nereid-serving')}")
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
