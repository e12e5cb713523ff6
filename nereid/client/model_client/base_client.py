"""What the blocking clients and those for asyncio share."""

import weakref
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeAlias

from nereid.client.classifier_errors import ClassifierError
from nereid.client.model_client.model_requests import ModelRequests
from nereid.client.request import (
    CONCURRENCY,
    TIMEOUT_S,
    MemoryKind,
    ProtocolName,
    check_arguments,
    key_header,
)
from nereid.client.result_kind import Result, ResultKind
from nereid.client.shared_memory import SharedMemory
from nereid.client.transport import Connection, Headers

# What a stream of images gives for each of them.
ResultOrError: TypeAlias = Result | ClassifierError


class BaseClient(ABC, Generic[Result]):
    """A connection to one model of one server; `Classifier` has the description of its arguments.

    Attributes:
        kind: the results that the model must have.
        model: name of the model.
    """

    kind: ClassVar[ResultKind[Any]]

    def __init__(
        self,
        url: str,
        protocol: ProtocolName = "grpc",
        model: str = "",
        timeout_s: float = TIMEOUT_S,
        concurrency: int = CONCURRENCY,
        shared_memory: MemoryKind | None = None,
        api_key: str = "",
    ) -> None:
        check_arguments(url, protocol, concurrency, shared_memory, api_key)
        self.model = model or self.kind.model
        self._concurrency = concurrency
        connection = self._connect(url, protocol, key_header(api_key))
        self._memory = SharedMemory(shared_memory, connection) if shared_memory else None
        self._requests = ModelRequests[Result](connection, self.model, self.kind, timeout_s, self._memory)
        # Also at the end of the process, without `close`.
        self._remove_regions = weakref.finalize(self, self._memory.close) if self._memory else lambda: None

    @abstractmethod
    def _connect(self, url: str, protocol: ProtocolName, headers: Headers) -> Connection:
        """Return the connection of this client."""

    @property
    def shared_memory_refusal(self) -> str:
        """Why images are sent in requests and not in shared memory; empty while nothing was refused."""
        return self._memory.refusal if self._memory else ""
