"""The administrative side of a running server: what is loaded, load it, unload it.

Over gRPC only: Triton's HTTP handler of loads holds up other clients' inference for as long as one takes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from nereid.errors import OperationFailed
from nereid.server.command_line import TOKEN_HEADER
from nereid.server.run_dir import ServerRecord

ASK_S, LOAD_S = 5.0, 300.0
# What gRPC says when nobody answers; anything else is the server's own word about the model.
LATE = "StatusCode.DEADLINE_EXCEEDED"
UNREACHED = ("StatusCode.UNAVAILABLE", LATE, "StatusCode.CANCELLED")
# Triton's refusals that have the status of a server that is away.
OWN_WORDS = ("is restricted", "explicit model load")
# Never through a proxy: the server is on this machine.
DIRECT = [("grpc.enable_http_proxy", 0)]


class NotReached(OperationFailed):
    """Nobody answers at the server's address."""


class Refused(OperationFailed):
    """The server answers, and will not do it; the message is its own."""


def token_headers(record: ServerRecord) -> dict[str, str]:
    """Return what opens a server's administrative APIs over gRPC."""
    return {f"triton-grpc-protocol-{TOKEN_HEADER}": record.token} if record.token else {}


class Control:
    """Loads and unloads models of a running server.

    All methods raise `NotReached` when it does not answer in time, and `Refused` with its own reason.

    Args:
        record: of the server.
        ask_s, load_s: how long an answer may take, and how long loading or unloading a model may.
    """

    def __init__(self, record: ServerRecord, ask_s: float = ASK_S, load_s: float = LOAD_S) -> None:
        self._url = record.url("grpc")
        self._headers = token_headers(record)
        self._ask_s, self._load_s = ask_s, load_s

    def is_ready(self, model: str, version: int) -> bool:
        """Tell whether a version of a model can be called."""
        try:
            return bool(self._call("is_model_ready", model, str(version), with_token=False))
        except Refused:
            return False

    def ready_versions(self) -> dict[str, set[int]]:
        """Return which versions of which models can be called, as the server's index has it."""
        index = self._call("get_model_repository_index")
        found: dict[str, set[int]] = {}
        for entry in index.models:
            if entry.state == "READY":
                found.setdefault(entry.name, set()).add(int(entry.version))
        return found

    def is_gone(self, model: str) -> bool:
        """Tell whether nothing of a model is left in the server, not even what is still being unloaded."""
        index = self._call("get_model_repository_index")
        return all(entry.name != model or entry.state in ("", "UNAVAILABLE") for entry in index.models)

    def config(self, model: str) -> Any:
        """Return the ModelConfig message by which a model is served."""
        return self._call("get_model_config", model).config

    def load(self, model: str) -> None:
        """Load a model as its folder has it now; versions that have not changed stay as they are."""
        self._call("load_model", model, is_load=True)

    def unload(self, model: str) -> None:
        """Unload all versions of a model once their requests are answered."""
        self._call("unload_model", model, is_load=True)

    def _call(self, name: str, *args: Any, is_load: bool = False, with_token: bool = True) -> Any:
        headers = self._headers if with_token else {}
        timeout_s = self._load_s if is_load else self._ask_s
        with self._connected() as client:
            call: Callable[..., Any] = getattr(client, name)
            try:
                return call(*args, headers=headers, client_timeout=timeout_s)
            except InferenceServerException as error:
                text = error.message() or str(error)
                if is_load and error.status() == LATE:
                    raise Refused(f"not done after {timeout_s:g} s") from None
                if error.status() in UNREACHED and not any(word in text for word in OWN_WORDS):
                    raise NotReached(f"the server at {self._url} does not answer: {text}") from None
                raise Refused(text) from None

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        # A connection for each call: after a restart of the server an old one waits before it tries again.
        with tritonclient.grpc.InferenceServerClient(self._url, channel_args=DIRECT) as client:
            yield client
