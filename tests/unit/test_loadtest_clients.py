"""The load test of the clients, without a server."""

import os
from pathlib import Path

import pytest
import tritonclient.grpc

from loadtest.clients import TRANSPORTS, _regions


class Client:
    """Takes every region."""

    def __init__(self, url: str) -> None:
        self.known: set[str] = set()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *why: object) -> None:
        assert not self.known

    def register_system_shared_memory(self, name: str, key: str, byte_size: int) -> None:
        """Note a region."""
        self.known.add(name)

    def unregister_system_shared_memory(self, name: str) -> None:
        """Forget a region."""
        self.known.remove(name)


def test_regions_go_when_a_measurement_fails(monkeypatch):
    """They are the machine's, and would outlive the process."""
    monkeypatch.setattr(tritonclient.grpc, "InferenceServerClient", Client)
    (way,) = (way for way in TRANSPORTS if way.memory and not way.is_async)
    pattern = f"loadtest-{os.getpid()}-*"

    def measure() -> None:
        with _regions("localhost:1", way, b"photo"):
            assert [*Path("/dev/shm").glob(pattern)]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        measure()
    assert not [*Path("/dev/shm").glob(pattern)]
