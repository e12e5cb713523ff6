"""`make demo`: start the real server, classify the sample on both versions over HTTP and gRPC, stop."""

import os
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nereid.assets import COFFEE
from nereid.client.classifier import Classifier
from nereid.client.errors import ClassifierError
from nereid.client.prediction import Prediction
from nereid.client.request import ProtocolName
from nereid.errors import ServerError
from nereid.server.command_line import DEFAULT_PROFILE, ServerOptions
from nereid.server.embedded_server import EmbeddedServer
from nereid.server.ports import Ports, free_ports

NETWORKS = {"1": "FP32", "2": "INT8"}
PROTOCOLS: tuple[ProtocolName, ...] = ("http", "grpc")
WARM_UP_REQUESTS = 5


def ask(server: EmbeddedServer, version: str, protocol: ProtocolName) -> Prediction:
    """Classify the sample photo on one version; the last of a few answers, when connections are warm."""
    options = server.options
    with Classifier(f"{options.host}:{getattr(options.ports, protocol)}", protocol) as classifier:
        return [classifier.classify(COFFEE, version=version) for _ in range(WARM_UP_REQUESTS)][-1]


def add_rows(table: Table, version: str, answers: dict[ProtocolName, Prediction]) -> None:
    """Add the top classes of one version, on which both protocols must agree."""
    http, grpc = answers["http"], answers["grpc"]
    if http.labels != grpc.labels:
        raise ServerError(f"HTTP and gRPC disagree on version {version}: {http.labels} and {grpc.labels}")
    latencies = [f"{answer.timings.total_ms:.1f} ms" for answer in (http, grpc)]
    for rank, label in enumerate(http.labels):
        told = [f"{http.version} ({NETWORKS[version]})", *latencies] if rank == 0 else [""] * 3
        table.add_row(label.name, f"{label.score:.3f}", *told, end_section=rank == len(http.labels) - 1)


def main() -> None:
    """Run the demo; ends with status 1 and the reason if anything fails."""
    console = Console()
    begin = time.monotonic()
    options = ServerOptions(profile=DEFAULT_PROFILE, ports=Ports(*free_ports(3)))
    console.print("starting the Triton server of nvidia-pytriton with model_repository/ …")
    try:
        with (
            tempfile.TemporaryDirectory() as run_dir,
            EmbeddedServer(options, Path(run_dir), os.environ) as server,
        ):
            console.print(f"every model answers after {time.monotonic() - begin:.1f} s")
            table = Table("label", "probability", "model version", "HTTP", "gRPC")
            for version in NETWORKS:
                add_rows(table, version, {protocol: ask(server, version, protocol) for protocol in PROTOCOLS})
            console.print(f"{COFFEE.name}, classified over HTTP and gRPC:", table)
        console.print("stopped; `make serve` keeps it running")
    except (ServerError, ClassifierError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
