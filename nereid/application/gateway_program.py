"""The gateway in front of a repository's server, or of a server elsewhere."""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from nereid.application.chosen_models import find_any_model
from nereid.base.errors import ServerError
from nereid.base.processes import available_cores
from nereid.base.task_registry import DEFAULT_TASK
from nereid.base.tracing.records import Sampling
from nereid.gateway.key_changes import open_ring
from nereid.gateway.settings import GatewayOptions
from nereid.server import run_dir

if TYPE_CHECKING:
    from nereid.gateway.models import ModelSource

# A worker needs about 0.7 ms of CPU for an image, and the models 7 ms and more.
CORES_PER_WORKER = 8


def default_workers() -> int:
    """Return the number of processes for a gateway on this machine."""
    return max(1, available_cores() // CORES_PER_WORKER)


def gateway(options: GatewayOptions, environment: Mapping[str, str]) -> None:
    """Serve until SIGINT or SIGTERM, and print the ports as JSON once the gateway listens.

    Raises:
        WrongUsage: the settings are invalid, or the repository has no such model.
        OperationFailed: the certificate, the keys or the address cannot be used.
    """
    # Not at the top: a server's supervisor imports this module, and needs neither them nor their packages.
    from nereid.gateway.http import serving
    from nereid.gateway.models import FixedModels

    repository, run_root = options.repository, run_dir.root(environment)
    source: ModelSource
    if repository is None:
        source = FixedModels(options.models or (DEFAULT_TASK.model,), options.url)
    else:
        from nereid.application.repository_models import RepositoryModels

        models = [find_any_model(repository, name) for name in options.models or ("",)]
        source = RepositoryModels(repository, lambda: run_dir.find(run_root, repository), models)
        if running := run_dir.find(run_root, repository):
            sampling = Sampling(running.trace_share, running.objective_ms / 1e3)
            options = replace(options, url=running.url("http"), traces=running.traces, sampling=sampling)
    options = replace(options, model=source.names()[0])
    with ExitStack() as stack:

        def announce(ports: dict[str, int]) -> None:
            print(json.dumps(ports), flush=True)
            if repository:  # record the port of HTTP for `status` while the gateway runs
                with suppress(ServerError, OSError):  # such as a read-only file system
                    folder = stack.enter_context(run_dir.occupy(run_root, repository))
                    info = run_dir.GatewayInfo(os.getpid(), options.host, ports["http"])
                    run_dir.write(folder, info)

        serving.serve(options, open_ring(options.keys, environment), source, announce)
