"""Publish a network that a request uploads, as `nereid publish` would.

The command runs in a process of its own: an examination takes memory and time that other requests need.
"""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from msgspec import Struct

from nereid import files
from nereid.gateway.failures import Failure, invalid_request
from nereid.gateway.http.http_request import GatewayRequest, GatewayResponse, json_response
from nereid.gateway.http.upload import RAW, ClientClosed, kind_of
from nereid.gateway.state import Gateway
from nereid.units import format_bytes

# Query parameters that become options of the command.
PARAMETERS = ("share", "accept_change", "tolerance", "max_slowdown", "max_memory")
# That of a network in one file. Source: protobuf's limit of a message.
MAX_BYTES = 2 * 2**30
# Seconds for each piece of the body, and for the whole body.
PIECE_S, BODY_S = 30.0, 900.0
WRONG_USAGE = 2
ELSEWHERE = (
    "a gateway with --url cannot publish: it has no repository; fix: nereid publish, beside the server"
)


class PublishAnswer(Struct):
    """A published version, and the line of the command that published it."""

    model: str
    version: int
    detail: str


async def publish(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Publish the body, an ONNX file, as the next version of a model; respond once it is served."""
    repository, given = gateway.settings.repository, request.query(PARAMETERS)
    if repository is None:
        raise Failure("not_found", ELSEWHERE)
    kind_of(request, (RAW,))
    if (accepts := given.get("accept_change", "true")) != "true":
        raise invalid_request(f"accept_change: expected true, or no such parameter, got {accepts[:64]!r}")
    words = [_option(name, value) for name, value in given.items()]
    async with _upload_folder(repository) as folder:
        source = folder / f"{request.model.name}.onnx"
        await _receive(request, source)
        command: tuple[str | Path, ...] = (
            "-m",
            "nereid",
            "publish",
            request.model.name,
            source,
            "--repository",
            repository,
            *words,
        )
        status, out, err = await _run(command)
    if status == 0:
        model, _, rest = out.strip().partition(" ")
        return json_response(PublishAnswer(model, int(rest.partition(":")[0]), out.strip()))
    reason = err.strip().rpartition("\n")[2].removeprefix("error: ").replace(f"{folder}/", "")
    raise invalid_request(reason) if status == WRONG_USAGE else Failure("conflict", reason)


def _option(name: str, value: str) -> str:
    option = f"--{name.replace('_', '-')}"
    return option if name == "accept_change" else f"{option}={value}"


@contextlib.asynccontextmanager
async def _upload_folder(repository: Path) -> AsyncIterator[Path]:
    """Provide the one folder for uploads of a repository; of a process that was killed, it has leftovers."""
    state = files.state_folder(repository)
    folder = state / "upload"
    try:
        state.mkdir(exist_ok=True)
        with files.locked_file(state / "upload.lock", "POST /v1/publish", 0):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
            try:
                yield folder
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    except files.LockTimeout:
        raise Failure("conflict", "another network is being published; retry later") from None
    except OSError as error:
        raise Failure("unavailable", f"not possible now: {error.strerror}", 1.0) from error


async def _receive(request: GatewayRequest, target: Path) -> None:
    """Write the body to a file, a piece at a time.

    Raises:
        Failure: it is empty, too large or late.
        ClientClosed: the client disconnected before the end of the body.
    """
    expected = f"expected an ONNX file of at most {format_bytes(MAX_BYTES)}"
    declared, size_bytes, is_complete = request.header(b"content-length"), 0, False
    if declared.isdecimal() and int(declared) > MAX_BYTES:
        raise Failure("too_large", f"{expected}, got {format_bytes(int(declared))}")
    try:
        async with asyncio.timeout(BODY_S):
            with target.open("wb") as file:
                while not is_complete:
                    async with asyncio.timeout(PIECE_S):
                        message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientClosed
                    piece, is_complete = message.get("body", b""), not message.get("more_body", False)
                    size_bytes += len(piece)
                    if size_bytes > MAX_BYTES:
                        raise Failure("too_large", f"{expected}, got more")
                    await asyncio.to_thread(file.write, piece)
    except TimeoutError:
        limits = f"each piece within {PIECE_S:g} s, and the whole body within {BODY_S:g} s"
        raise Failure("body_timeout", f"expected {limits}") from None
    if not size_bytes:
        raise invalid_request(f"{expected}, got an empty body")


async def _run(words: Sequence[str | Path]) -> tuple[int, str, str]:
    """Run a command of Python to its end, even if the client leaves; returns status, stdout and stderr."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")
