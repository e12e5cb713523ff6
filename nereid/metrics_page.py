"""Samples of a metrics page in Prometheus' text format, as far as Triton and `nereid serve` write it."""

import http.client
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nereid.addresses import open_http

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: its metric's name, its labels and its value."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse(page: str) -> Iterator[Sample]:
    """Yield the samples of a page under the names that the page has.

    `prometheus_client.parser` appends `_total` to the counters of Triton, such as `nv_inference_count`.
    """
    for name, labels, value in re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", page, re.MULTILINE):
        yield Sample(name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value))


def render(
    samples: Mapping[tuple[str, Labels], float], prefix: str, metrics: Mapping[str, tuple[str, str]]
) -> str:
    """Return samples in Prometheus' text format; each metric has its header, with or without samples.

    Args:
        samples: values by name and labels.
        prefix: the beginning of all names.
        metrics: kind and description of each metric.
    """
    lines = []
    for name, (kind, text) in metrics.items():
        lines += [f"# HELP {prefix}{name} {text}", f"# TYPE {prefix}{name} {kind}"]
        for (family, labels), value in sorted(samples.items()):
            if family == name:
                inner = ",".join(f'{key}="{_escape(word)}"' for key, word in labels)
                lines.append(f"{prefix}{name}{f'{{{inner}}}' if inner else ''} {value:.15g}")
    return "\n".join(lines) + "\n"


def _escape(word: str) -> str:
    return word.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def fetch(url: str, timeout_s: float) -> str:
    """Return the text of the metrics page at an address, HOST:PORT or `unix:PATH`.

    Raises:
        OSError, http.client.HTTPException: no response in time, or a response without the page.
    """
    connection = open_http(url, timeout_s)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        page = response.read().decode(errors="replace")
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise http.client.HTTPException(f"{response.status} {page.strip()[:200]}")
    return page
