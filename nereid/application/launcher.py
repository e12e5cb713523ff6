"""Programs that another program of Nereid starts: a function called with options passed as JSON on stdin.

Options on a command line would be a second interface, which no type checker sees, and which other users read.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import Popen
from typing import Any, TypeVar, get_type_hints

import msgspec

from nereid.application import exit_codes

Options = TypeVar("Options")
# Reads its settings from the options and the environment, and exits as a command does: see `exit_codes`.
Program = Callable[[Options, Mapping[str, str]], None]


def command(program: Program[Options]) -> list[str]:
    """Return the command that calls a function of a module in a process of its own."""
    return [sys.executable, "-P", "-m", __name__, program.__module__, program.__name__]


def encode(options: Any) -> bytes:
    """Return the options of a program as its stdin."""
    return msgspec.json.encode(options, enc_hook=os.fspath)


def start(program: Program[Options], options: Options, **more: Any) -> "Popen[str]":
    """Start a program with its options; `more` are arguments of `Popen`."""
    with os.fdopen(os.memfd_create("options"), "w+b") as stdin:
        stdin.write(encode(options))
        stdin.seek(0)
        return Popen(command(program), stdin=stdin, text=True, **more)


def _main(module: str, name: str, environment: Mapping[str, str]) -> None:
    with exit_codes.program():
        program = getattr(importlib.import_module(module), name)
        options = msgspec.json.decode(
            sys.stdin.buffer.read(), type=get_type_hints(program)["options"], dec_hook=_path
        )
        program(options, environment)


def _path(kind: type, value: Any) -> Path:
    if kind is not Path:
        raise NotImplementedError
    return Path(value)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], os.environ)
