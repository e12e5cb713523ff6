"""`nereid serve`: the embedded server in the foreground, until a signal or its own end."""

import contextlib
import json
import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import FrameType
from typing import NoReturn

from ops import run_dir
from ops.embedded import (
    DEFAULT_PROFILE,
    PLAIN_PROFILE,
    EmbeddedServer,
    Ports,
    ServerError,
    ServerOptions,
    free_ports,
)
from ops.repository import describe_threads, thread_budget
from python_backend.errors import InvalidConfig

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Stopped(BaseException):
    """A signal asked the server to stop."""


def serve(options: ServerOptions, environment: Mapping[str, str]) -> None:
    """Serve until SIGINT or SIGTERM; prints the ports as one JSON line on stdout once ready.

    A second signal ends the server at once instead of waiting for its requests.

    Raises:
        ServerError: the server cannot start, a model failed to load, or it ended by itself.
    """
    options = replace(options, ports=_with_free_ports(options), token=secrets.token_urlsafe(24))
    for each in SIGNALS:
        signal.signal(each, _stop)
    try:
        with (
            run_dir.occupy(run_dir.root(environment), options.repository) as folder,
            EmbeddedServer(options, folder, environment, _log) as server,
        ):
            _log_threads(options)
            run_dir.write(folder, _record(server))
            print(json.dumps(asdict(options.ports)), flush=True)
            status = server.wait()
        raise ServerError(f"tritonserver ended by itself with status {status}\n{server.log.reason()}")
    except _Stopped:
        _log("stopped")


def check_options(options: ServerOptions) -> None:
    """Refuse what `tritonserver` would only complain about later.

    Raises:
        ValueError: no such repository, or no model of it has the profile.
    """
    repository, profile = options.repository, options.profile
    if not any(repository.glob("*/config.pbtxt")):
        raise ValueError(f"{repository} is no model repository: no MODEL/config.pbtxt in it")
    known = {PLAIN_PROFILE, *(path.stem for path in repository.glob("*/configs/*.pbtxt"))}
    if profile != DEFAULT_PROFILE and profile not in known:
        raise ValueError(f"no model has the profile '{profile}', known are: {', '.join(sorted(known))}")


def _with_free_ports(options: ServerOptions) -> Ports:
    asked = asdict(options.ports)
    free = iter(free_ports(len(asked)))
    return Ports(**{name: port or next(free) for name, port in asked.items()})


def _record(server: EmbeddedServer) -> run_dir.ServerRecord:
    options = server.options
    return run_dir.ServerRecord(
        server.pid, options.host, options.ports, str(options.repository), options.profile, options.token
    )


def _log_threads(options: ServerOptions) -> None:
    with contextlib.suppress(InvalidConfig):  # Triton says it better
        text, fits = describe_threads(thread_budget(options.repository, options.profile))
        _log(text if fits else f"warning: {text}")


def _log(line: str) -> None:
    # A reader that went away must not stop the server: Triton blocks when nobody takes its log.
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    for each in SIGNALS:
        signal.signal(each, _stop_now)
    raise _Stopped


def _stop_now(number: int, frame: FrameType | None) -> NoReturn:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise _Stopped
