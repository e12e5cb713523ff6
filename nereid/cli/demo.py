"""`nereid demo`: classify the sample photo on both model versions, over HTTP and gRPC."""

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nereid.assets import COFFEE
from nereid.cli.options import environment
from nereid.errors import ServerError
from nereid.units import format_ms

if TYPE_CHECKING:
    from rich.table import Table

    from nereid.client.prediction import Prediction
    from nereid.client.request import ProtocolName
    from nereid.server.command_line import ServerOptions

NETWORKS = {"1": "FP32", "2": "INT8"}
WARM_UP_REQUESTS = 5
TOP = 3


def demo(context: typer.Context) -> None:
    """Start the real Triton server, classify a sample photo on both model versions, and stop."""
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
    from nereid.client.classifier import Classifier

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
