"""`nereid init` and `nereid demo`: create your own repository, and get a first answer from a server."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from nereid.base.assets import COFFEE, copy_models
from nereid.base.errors import OperationFailed, ServerError, WrongUsage
from nereid.base.task import Task
from nereid.base.task_registry import DEFAULT_TASK
from nereid.base.units import format_ms
from nereid.cli import options
from nereid.cli.tables import console
from nereid.server.command_line import DEFAULT_PROFILE, ServerOptions
from nereid.server.ports import Ports, free_ports

if TYPE_CHECKING:
    from nereid.client.request import ProtocolName

NETWORKS = {"1": "FP32", "2": "INT8"}
WARM_UP_REQUESTS = 5
TOP = 3
# A slow machine may need a minute for a large image.
TIMEOUT_S = 120.0


def init(
    folder: Annotated[
        Path,
        typer.Argument(
            help="New or empty folder for the repository; with --task, also a repository to add the task's "
            "models to.",
            metavar="DIR",
        ),
    ],
    task: options.Task = None,
) -> None:
    """Create your own model repository: a copy of the default models that you can change.

    With --task read, the repository contains the models that read text. Upgrading Nereid never changes this
    folder.
    """
    source = (options.PACKAGED_TASKS[task] if task else DEFAULT_TASK).default_repository
    is_new = not any(folder.glob("*")) and (folder.is_dir() or not folder.exists())
    if not is_new and (not task or not any(folder.glob("*/config.pbtxt"))):
        raise WrongUsage(f"'{folder}' already exists and is not an empty folder; fix: name a new folder")
    names = (path.name for path in source.iterdir() if not path.name.startswith("."))
    if taken := sorted(name for name in names if (folder / name).exists()):
        raise WrongUsage(f"'{folder}' already has {', '.join(taken)}; fix: name another folder")
    copy_models(source, folder)
    models = f"the models of task `{task}`" if task else "the default models"
    print(f"created '{folder}' with {models}" if is_new else f"added {models} to '{folder}'")
    print(f"serve it:                       nereid serve --repository {folder}")
    print(f"make it the default of a shell: export NEREID_REPOSITORY={folder.resolve()}")


def demo(
    context: typer.Context,
    image: Annotated[
        Path | None,
        typer.Argument(help="Image to read, with --task read.", metavar="[IMAGE]", show_default="a sample"),
    ] = None,
    task: options.Task = None,
) -> None:
    """Start a real Triton server, classify a sample photo with both versions of a model, and stop.

    With --task read, the server reads the text of a sample parcel label, or of IMAGE.
    """
    chosen = options.PACKAGED_TASKS[task] if task else DEFAULT_TASK
    if chosen is not DEFAULT_TASK:
        show_result(context, chosen, image or chosen.sample or COFFEE)
    elif image:
        raise WrongUsage("IMAGE needs --task read; fix: nereid demo --task read IMAGE")
    else:
        show_versions(context)


@contextmanager
def running_server(context: typer.Context, task: Task) -> Iterator[ServerOptions]:
    """Run a server with the package's models of a task."""
    from nereid.server.embedded_server import EmbeddedServer

    started_at = time.monotonic()
    started = ServerOptions(task.default_repository, DEFAULT_PROFILE, ports=Ports(*free_ports(3)))
    print(
        f"starting the Triton server of nvidia-pytriton with the models of task `{task.name}` …", flush=True
    )
    with (
        tempfile.TemporaryDirectory() as run_dir,
        EmbeddedServer(started, Path(run_dir), options.environment(context)),
    ):
        print(f"every model answers after {time.monotonic() - started_at:.1f} s", flush=True)
        yield started


def show_result(context: typer.Context, task: Task, image: Path) -> None:
    """Send an image to a dedicated server, and print the result.

    Raises:
        OperationFailed: the file cannot be read, or is not an image.
    """
    from nereid.client.client_errors import RequestRefused

    try:
        encoded = image.read_bytes()
    except OSError as error:
        raise OperationFailed(f"cannot read '{image}': {error.strerror}") from None
    with (
        running_server(context, task) as server,
        task.entry_point("client")(
            f"{server.host}:{server.ports.http}", "http", timeout_s=TIMEOUT_S
        ) as client,
    ):
        started_at = time.monotonic()
        try:
            result = client.infer(encoded)
        except RequestRefused as error:
            raise OperationFailed(str(error)) from None
        print(f"{image.name}: {task.past_participle} in {format_ms((time.monotonic() - started_at) * 1e3)}")
        task.entry_point("view").show(result)
    print(f"stopped; `nereid serve --task {task.name}` keeps the server running")


def show_versions(context: typer.Context) -> None:
    """Classify the sample photo on a dedicated server, on both model versions and protocols."""
    with running_server(context, DEFAULT_TASK) as server:
        table = Table("label", "probability", "model version", "HTTP", "gRPC")
        for version in NETWORKS:
            add_rows(table, version, measure(server, version, "http"), measure(server, version, "grpc"))
        print(f"{COFFEE.name}, classified over HTTP and gRPC:")
        console().print(table)
    print("stopped; `nereid serve` keeps the server running")


def measure(server: ServerOptions, version: str, protocol: "ProtocolName") -> Any:
    """Classify the sample photo on one version; returns the last of a few responses, on a warm connection."""
    url = f"{server.host}:{getattr(server.ports, protocol)}"
    with DEFAULT_TASK.entry_point("client")(url, protocol) as client:
        return [client.infer(COFFEE, version=version, top_k=TOP) for _ in range(WARM_UP_REQUESTS)][-1]


def add_rows(table: Table, version: str, http: Any, grpc: Any) -> None:
    """Add the best classes of one version.

    Raises:
        ServerError: the two protocols returned different classes.
    """
    if http.labels != grpc.labels:
        raise ServerError(f"HTTP and gRPC disagree on version {version}: {http.labels} and {grpc.labels}")
    latencies = [format_ms(response.timings.total_ms) for response in (http, grpc)]
    for rank, label in enumerate(http.labels):
        details = [f"{http.version} ({NETWORKS[version]})", *latencies] if rank == 0 else [""] * 3
        table.add_row(label.name, f"{label.score:.3f}", *details, end_section=rank == len(http.labels) - 1)
