"""The root of the command line: arguments that may be typed as options, and the end of each command."""

import sys
from typing import Any

from typer._click.exceptions import ClickException  # Typer's copy of Click; not exported otherwise
from typer.core import TyperCommand, TyperGroup

from nereid.application import exit_codes
from nereid.base.errors import WrongUsage

# Options that stand for the first argument of a command, by its name.
OPTIONS_OF_ARGUMENTS = {"model": ("--model", "--route"), "repository": ("--repository",)}


class Command(TyperCommand):
    """A command whose first argument may be typed as an option, as in other commands: `--model NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line."""
        first = next((each.name for each in self.params if each.param_type_name == "argument"), "")
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
        """Run a command line, and end the process."""
        with exit_codes.program():
            try:
                code = super().main(*args, **options | {"standalone_mode": False})
            except ClickException as error:
                context = getattr(error, "ctx", None)
                fix = f"see `{context.command_path} --help`" if context else ""
                raise WrongUsage(error.format_message().rstrip("."), fix) from None
        sys.exit(code if isinstance(code, int) else 0)
