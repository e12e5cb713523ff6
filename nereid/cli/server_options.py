"""Address and token of a running server that `nereid serve` did not start, as options of commands."""

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from nereid.base.errors import WrongUsage, value_errors_as_wrong_usage
from nereid.cli.options import environment
from nereid.server import run_dir
from nereid.server.command_line import AUTO_PROFILE, DEFAULT_PROFILE, read_token
from nereid.server.ports import Ports
from nereid.server.run_dir import ServerInfo

Address: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Triton's gRPC address, for a server that `nereid serve` did not start here; its metrics "
        "page is on the next port.",
        metavar="HOST:PORT",
        envvar="NEREID_SERVER",
        show_default=False,
    ),
]
TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="File with the token for that server's management APIs.",
        metavar="FILE",
        envvar="NEREID_TOKEN_FILE",
    ),
]
# Marks a command that has printed the note about other servers.
NOTED = "noted"
OPTIONS = {"server": (Address, ""), "token_file": (TokenFile, None)}


def with_server(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options `--server` and `--token-file` to a command, for `find_server`."""

    @functools.wraps(command)
    def run(context: typer.Context, **values: Any) -> None:
        context.meta.update({name: values.pop(name) for name in OPTIONS})
        command(context=context, **values)

    signature = inspect.signature(command)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in OPTIONS.items()
    ]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = command.__annotations__ | {name: kind for name, (kind, _) in OPTIONS.items()}
    return run


def find_server(context: typer.Context, repository: Path) -> ServerInfo | None:
    """Return the server that the command line names, else the newest running one of a repository, if any.

    If there are several, a note on stderr names the others.

    Raises:
        WrongUsage: the address is not HOST:PORT, or the token file has no token.
    """
    if address := context.meta.get("server"):
        return _named(context, repository, address)
    servers = run_dir.find_servers(run_dir.root(environment(context)), repository)
    if servers[1:] and not context.meta.get(NOTED):
        context.meta[NOTED] = True
        others = ", ".join(str(server.pid) for server in servers[:-1])
        text = f"note: this command uses the newest server of this repository, pid {servers[-1].pid}"
        print(f"{text}; it does not reach pid {others}", file=sys.stderr)
    return servers[-1] if servers else None


def _named(context: typer.Context, repository: Path, address: str) -> ServerInfo:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise WrongUsage(f"--server: expected HOST:PORT of Triton's gRPC, got '{address}'")
    path = context.meta.get("token_file")
    with value_errors_as_wrong_usage():
        token = read_token(path) if path else ""
    profile = environment(context).get("NEREID_PROFILE", AUTO_PROFILE)
    if profile == AUTO_PROFILE:  # the GPU of that server is not this machine's
        profile = DEFAULT_PROFILE
    ports = Ports(http=0, grpc=int(port), metrics=int(port) + 1)
    return ServerInfo(0, host, ports, str(repository), profile, token)
