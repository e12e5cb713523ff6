"""Triton's metrics page, read: Prometheus' text format as far as Triton writes it."""

import http.client
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the page."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse(page: str) -> Iterator[Sample]:
    """Yield the samples of a page."""
    for name, labels, value in re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", page, re.MULTILINE):
        yield Sample(name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value))


def fetch(host: str, port: int, timeout_s: float) -> str:
    """Return a server's metrics page.

    Raises:
        OSError, http.client.HTTPException: the server does not answer in time, or not with the page.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        page = response.read().decode(errors="replace")
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise http.client.HTTPException(f"{response.status} {page.strip()[:200]}")
    return page
