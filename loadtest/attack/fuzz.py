"""Send random changes of real requests to a guarded server, which must answer each and live on."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from loadtest.attack.attacks import CLOSED, SERVICE, TIMEOUT_S, Front
from loadtest.attack.mutations import Case, Mutations, as_request

CALLERS = 16
# Responses that blame the request, or answer it; a request may ask for a short deadline.
GOOD = frozenset(
    {"200", "400", "404", "405", "408", "413", "415", "429", "431", "504", CLOSED}
    | {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
)


@dataclass(slots=True)
class Outcome:
    """The number of cases by channel and status, and the cases with a wrong status."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, Case]] = field(default_factory=list)


async def fuzz(front: Front, pids: Sequence[int], cases: int, seed: int) -> Outcome:
    """Send a number of cases, and check after each that the processes with these pids live.

    Raises:
        RuntimeError: a process has ended; the message has the cases that were in flight.
    """
    mutations, outcome, left = Mutations(seed), Outcome(), cases
    in_flight: dict[int, Case] = {}

    async def send(caller: int) -> None:
        nonlocal left
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.grpc_port}") as channel:
            method = channel.unary_unary(f"{SERVICE}ModelInfer")
            while left > 0:
                left -= 1
                case = in_flight[caller] = mutations.next()
                status = await (_call(method, case) if case.channel == "gRPC" else _post(front, case))
                outcome.statuses[f"{case.channel} {status}"] += 1
                if status not in GOOD:
                    outcome.wrong.append((status, case))
                if not all(Path(f"/proc/{pid}").exists() for pid in pids):
                    raise RuntimeError("\n".join(map(repr, in_flight.values())))

    async with asyncio.TaskGroup() as group:
        for caller in range(CALLERS):
            group.create_task(send(caller))
    return outcome


async def _call(method: grpc.aio.UnaryUnaryMultiCallable, case: Case) -> str:
    try:
        await method(case.content, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def _post(front: Front, case: Case) -> str:
    """Send a whole request, or a JSON body, on a connection of its own; return the last status."""
    content = as_request(case.content) if case.channel == "JSON" else case.content
    reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            writer.write(content)
            writer.write_eof()
            response = await reader.read()
    except (ConnectionError, OSError):
        return CLOSED
    finally:
        writer.close()
    statuses = [line.split(b" ", 2)[1] for line in response.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    final = [status for status in statuses if status != b"100"]
    return final[-1].decode() if final else CLOSED
