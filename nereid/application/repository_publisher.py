"""Publish networks in a repository for a gateway.

Each is published in its own process, because an examination uses memory and time that other requests need.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from nereid.application import launcher
from nereid.application.exit_codes import WRONG_USAGE
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.gateway.failures import Failure
from nereid.gateway.models import PublishAnswer, PublishCommand

# The start of the last line of a command that failed as expected.
ERROR = "error: "
RETRY_AFTER_S = 1.0
log = logging.getLogger("nereid.gateway")


async def publish(command: PublishCommand) -> PublishAnswer:
    """Publish a network; the process runs to completion even if the client disconnects.

    Raises:
        WrongUsage: the command itself is invalid.
        OperationFailed: the network or the server was refused.
        Failure: `unavailable`, the process ended without a reason.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *launcher.command(publish_network), stdin=pipe, stdout=pipe, stderr=pipe
    )
    out, err = await process.communicate(launcher.encode(command))
    if process.returncode == 0:
        return msgspec.json.decode(out, type=PublishAnswer)
    last_line = err.decode(errors="replace").strip().rpartition("\n")[2]
    if not last_line.startswith(ERROR):
        log.error("publishing %s ended with status %s: %s", command.model, process.returncode, last_line)
        text = f"the publication ended with status {process.returncode}, possibly out of memory"
        raise Failure("unavailable", f"{text}; nereid versions shows whether it is complete", RETRY_AFTER_S)
    reason = last_line.removeprefix(ERROR)
    raise WrongUsage(reason) if process.returncode == WRONG_USAGE else OperationFailed(reason)


def publish_network(options: PublishCommand, environment: Mapping[str, str]) -> None:
    """Publish a network, and print the answer as JSON.

    Raises:
        WrongUsage: the share is invalid, or the models of this repository cannot be changed.
        OperationFailed: the network or the server was refused.
    """
    # Imported here because a gateway imports this module, and needs no ONNX Runtime.
    from nereid.application.chosen_models import changeable_repository
    from nereid.models.publish import publisher
    from nereid.models.publish.examination import ExaminationLimits
    from nereid.server import run_dir

    repository = changeable_repository(options.repository)
    server_info = run_dir.find(run_dir.root(environment), repository)
    limits: dict[str, Any] = {"is_change_accepted": options.is_change_accepted, **options.limits}
    done = publisher.publish(
        repository, options.model, options.source, server_info, ExaminationLimits(**limits), options.share
    )
    print(msgspec.json.encode(PublishAnswer(done.model, done.version, done.line(server_info))).decode())
