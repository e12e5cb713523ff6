"""Publish networks in a repository for a gateway.

Each is published in a process of its own: an examination takes memory and time that other requests need.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from nereid.application import child
from nereid.application.chosen_models import own_repository
from nereid.application.exit_codes import WRONG_USAGE
from nereid.gateway.models import PublishAnswer, PublishOrder, PublishRefused
from nereid.publish import publisher
from nereid.publish.examination.examine import Gates
from nereid.server import run_dir


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """An order, and the repository of the model."""

    repository: Path
    order: PublishOrder


@dataclass(frozen=True, slots=True)
class RepositoryPublisher:
    """Publishes networks in a repository."""

    repository: Path

    async def publish(self, order: PublishOrder) -> PublishAnswer:
        """Publish a network; the process runs to its end, even if the client leaves.

        Raises:
            PublishRefused: it was not published.
        """
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *child.command(publish_network), stdin=pipe, stdout=pipe, stderr=pipe
        )
        out, err = await process.communicate(child.encode(PublishOptions(self.repository, order)))
        if process.returncode == 0:
            return msgspec.json.decode(out, type=PublishAnswer)
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        raise PublishRefused(last.removeprefix("error: "), process.returncode == WRONG_USAGE)


def publish_network(options: PublishOptions, environment: Mapping[str, str]) -> None:
    """Publish a network, and print the answer as JSON.

    Raises:
        WrongUsage: the share is invalid, or the models of this repository cannot be changed.
        OperationFailed: the network or the server was refused.
    """
    order, repository = options.order, own_repository(options.repository)
    record = run_dir.find(run_dir.root(environment), repository)
    limits: dict[str, Any] = {"is_change_accepted": order.is_change_accepted, **order.limits}
    done = publisher.publish(repository, order.model, order.source, record, Gates(**limits), order.share)
    print(msgspec.json.encode(PublishAnswer(done.model, done.version, done.line(record))).decode())
