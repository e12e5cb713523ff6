"""`nereid demo`: the first answer of the server: classes of the sample photo, or text of the sample label."""

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nereid.base.assets import COFFEE, PARCEL_LABEL, TEXT_REPOSITORY
from nereid.base.errors import OperationFailed, ServerError, WrongUsage
from nereid.base.units import format_ms
from nereid.cli.options import Task, environment

if TYPE_CHECKING:
    from rich.table import Table

    from nereid.client.request import ProtocolName
    from nereid.server.command_line import ServerOptions
    from nereid.tasks.classify.result import Prediction
    from nereid.tasks.read.result import Reading

NETWORKS = {"1": "FP32", "2": "INT8"}
WARM_UP_REQUESTS = 5
TOP = 3
# A slow machine may need a minute for a large image.
READ_TIMEOUT_S = 120.0


def demo(
    context: typer.Context,
    image: Annotated[
        Path | None,
        typer.Argument(help="Image to read, with --task read.", metavar="[IMAGE]", show_default="a sample"),
    ] = None,
    task: Task = None,
) -> None:
    """Start the real Triton server, classify a sample photo on both model versions, and stop.

    With --task read, the server reads the text of a sample parcel label, or of IMAGE.
    """
    if task == "read":
        show_text(context, image or PARCEL_LABEL)
    elif image:
        raise WrongUsage("IMAGE needs --task read; fix: nereid demo --task read IMAGE")
    else:
        show_classes(context)


def show_text(context: typer.Context, image: Path) -> None:
    """Read an image with a server of its own, and print its lines with their confidence.

    Raises:
        OperationFailed: the file cannot be read, or is not an image.
    """
    from nereid.cli.image_commands.views import TEXTS
    from nereid.server.command_line import DEFAULT_PROFILE, ServerOptions
    from nereid.server.embedded_server import EmbeddedServer
    from nereid.server.ports import Ports, free_ports

    try:
        encoded = image.read_bytes()
    except OSError as error:
        raise OperationFailed(f"cannot read '{image}': {error.strerror}") from None
    begin_s = time.monotonic()
    ports = Ports(*free_ports(3))
    options = ServerOptions(repository=TEXT_REPOSITORY, profile=DEFAULT_PROFILE, ports=ports)
    print("starting the Triton server of nvidia-pytriton with the models that read text …", flush=True)
    with (
        tempfile.TemporaryDirectory() as run_dir,
        EmbeddedServer(options, Path(run_dir), environment(context)),
    ):
        print(f"every model answers after {time.monotonic() - begin_s:.1f} s", flush=True)
        read_s = time.monotonic()
        found = read(f"{options.host}:{ports.http}", encoded)
        took = format_ms((time.monotonic() - read_s) * 1e3)
        print(f"{image.name}: {len(found.lines)} line(s), read in {took}")
        TEXTS.show(found)
    print("stopped; `nereid serve --task read` keeps the server running")


def read(url: str, encoded: bytes) -> "Reading":
    """Return the text of an encoded image.

    Raises:
        OperationFailed: the server rejected the image.
    """
    from nereid.client.classifier_errors import RequestRefused
    from nereid.tasks.read.client import Reader

    with Reader(url, "http", timeout_s=READ_TIMEOUT_S) as reader:
        try:
            return reader.read(encoded)
        except RequestRefused as error:
            raise OperationFailed(str(error)) from None


def show_classes(context: typer.Context) -> None:
    """Classify the sample photo with a server of its own, on both model versions and protocols."""
    from rich.table import Table

    from nereid.cli.tables import console
    from nereid.server.command_line import DEFAULT_PROFILE, ServerOptions
    from nereid.server.embedded_server import EmbeddedServer
    from nereid.server.ports import Ports, free_ports

    begin_s = time.monotonic()
    options = ServerOptions(profile=DEFAULT_PROFILE, ports=Ports(*free_ports(3)))
    print("starting the Triton server of nvidia-pytriton with the default models …", flush=True)
    with (
        tempfile.TemporaryDirectory() as run_dir,
        EmbeddedServer(options, Path(run_dir), environment(context)),
    ):
        print(f"every model answers after {time.monotonic() - begin_s:.1f} s", flush=True)
        table = Table("label", "probability", "model version", "HTTP", "gRPC")
        for version in NETWORKS:
            add_rows(table, version, measure(options, version, "http"), measure(options, version, "grpc"))
        print(f"{COFFEE.name}, classified over HTTP and gRPC:")
        console().print(table)
    print("stopped; `nereid serve` keeps the server running")


def measure(options: "ServerOptions", version: str, protocol: "ProtocolName") -> "Prediction":
    """Classify the sample photo on one version; returns the last of a few responses, on a warm connection."""
    from nereid.tasks.classify.client import Classifier

    with Classifier(f"{options.host}:{getattr(options.ports, protocol)}", protocol) as classifier:
        return [classifier.classify(COFFEE, version=version, top_k=TOP) for _ in range(WARM_UP_REQUESTS)][-1]


def add_rows(table: "Table", version: str, http: "Prediction", grpc: "Prediction") -> None:
    """Add the best classes of one version.

    Raises:
        ServerError: the two protocols gave different classes.
    """
    if http.labels != grpc.labels:
        raise ServerError(f"HTTP and gRPC disagree on version {version}: {http.labels} and {grpc.labels}")
    latencies = [format_ms(response.timings.total_ms) for response in (http, grpc)]
    for rank, label in enumerate(http.labels):
        details = [f"{http.version} ({NETWORKS[version]})", *latencies] if rank == 0 else [""] * 3
        table.add_row(label.name, f"{label.score:.3f}", *details, end_section=rank == len(http.labels) - 1)
