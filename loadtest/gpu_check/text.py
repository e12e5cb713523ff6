"""Reading of a parcel label with the profile `gpu`, and with the profile `cpu` on the same machine."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loadtest import servers
from loadtest.gpu_check import served
from loadtest.gpu_check.processes import Context
from nereid.assets import PARCEL_LABEL, TEXT_REPOSITORY
from nereid.client.reader_client import Reader
from nereid.server.embedded_server import EmbeddedServer, infer_path
from nereid.tune import load_generator
from nereid.tune.trial import TO_IMAGES

MODEL, LINE = "read_text_v1", "RB 123 456 785 GB"
CONCURRENCIES, SECONDS = (1, 4, 16), 2.0


def measure(context: Context) -> Iterator[dict[str, Any]]:
    """Yield whether the label is read rightly, and latencies and rates, of each profile."""
    for profile in ("gpu", "cpu"):
        with TemporaryDirectory() as folder:
            serving = servers.served(Path(folder), context.environment, profile, TEXT_REPOSITORY)
            with serving as server:
                yield from profile_of(server, profile, context)


def profile_of(server: EmbeddedServer, profile: str, context: Context) -> Iterator[dict[str, Any]]:
    """Yield the results of a server of the text models."""
    port, label = server.options.ports.http, PARCEL_LABEL.read_bytes()
    with Reader(f"{load_generator.HOST}:{port}", "http", MODEL) as reader:
        yield {f"{profile}_is_right": LINE in [line.text for line in reader.read(label).lines]}
    request = load_generator.post_request(load_generator.HOST, port, infer_path(MODEL), label, TO_IMAGES)
    for rows in served.loads(port, request, SECONDS, context.left_s, CONCURRENCIES):
        yield {
            profile: rows,
            f"{profile}_p50_ms": rows[0]["p50_ms"],
            f"best_{profile}_per_s": served.best(rows),
        }
