"""A server without Triton: it loads what is in its repository when told, and reports its routes' files."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from nereid.backends.triton.metrics import ROUTE_PREFIX
from nereid.base.config.model_config import read_pbtxt
from nereid.base.errors import OperationFailed
from nereid.models.routes.location import find_routes, read_route_file
from nereid.repository.repository_index import model_folders, served_versions, steps_of
from nereid.server.ports import Ports
from nereid.server.run_dir import ServerInfo
from tests.http_receiver import receiving

# Not `fsync`: what a killed process has written stays, synchronised or not.
CHANGES = ("mkdir", "rename", "replace", "rmdir", "unlink")


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # it has no types
    """Loads models from a repository's files; it never has a version that another one still needs.

    `loaded` has the versions by model, `configs` the configs they were loaded with, and `counts` the samples
    of its metrics page.
    """

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.loaded: dict[str, set[int]] = {}
        self.configs: dict[str, str] = {}
        self.counts = Counter[str]()
        self._in_use: dict[str, str] = {}
        for folder in sorted(model_folders(repository), key=lambda path: "ensemble" in _text(path)):
            self._load(folder.name)

    def _load(self, model: str) -> None:
        document = read_pbtxt(self.repository / model / "config.pbtxt")
        for step, version in steps_of(document):
            if version not in self.loaded.get(step, ()):
                raise OperationFailed(f"'{model}' needs version {version} of '{step}'")
        versions = served_versions(self.repository / model, document)
        for version in versions:
            folder = self.repository / model / str(version)
            networks = document.get("backend") or "ensemble_scheduling" in document
            if not folder.is_dir() or not (networks or (folder / "model.onnx").stat().st_size > 20):
                raise OperationFailed(f"'{model}' has no version {version}")
        self.loaded[model] = {*versions}
        self.configs[model] = _text(self.repository / model)

    def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        try:
            self._load(request.model_name)
        except (OperationFailed, OSError) as error:
            context.abort(grpc.StatusCode.INTERNAL, f"failed to load: {error}")
        return service_pb2.RepositoryModelLoadResponse()

    def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        self.loaded.pop(request.model_name, None)
        self.configs.pop(request.model_name, None)
        return service_pb2.RepositoryModelUnloadResponse()

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        pairs = [(name, str(version)) for name, versions in self.loaded.items() for version in versions]
        entry = service_pb2.RepositoryIndexResponse.ModelIndex
        models = [entry(name=name, version=version, state="READY") for name, version in pairs]
        return service_pb2.RepositoryIndexResponse(models=models)

    def ModelReady(self, request: Any, context: Any) -> Any:
        is_ready = int(request.version or 1) in self.loaded.get(request.name, ())
        return service_pb2.ModelReadyResponse(ready=is_ready)

    def ModelConfig(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelConfigResponse(config=model_config_pb2.ModelConfig(name=request.name))

    def ModelInfer(self, request: Any, context: Any) -> Any:
        if int(request.model_version or 1) not in self.loaded.get(request.model_name, ()):
            context.abort(grpc.StatusCode.UNAVAILABLE, f"'{request.model_name}' is not ready")
        return service_pb2.ModelInferResponse(model_name=request.model_name)

    def page(self) -> str:
        samples = dict(self.counts)
        for location in find_routes(self.repository):
            state = read_route_file(location)
            if all(entry.version in self.loaded.get(entry.model, ()) for entry in state.route().variants):
                self._in_use[location.name] = sha256(state.content or b"").hexdigest()
            labels = f'model_instance="0",route="{location.name}",sha256="{self._in_use.get(location.name)}"'
            samples[f"served_since_seconds{{{labels}}}"] = 1
        return "".join(f"{ROUTE_PREFIX}{name} {value}\n" for name, value in samples.items())


def _text(folder: Path) -> str:
    return (folder / "config.pbtxt").read_text()


@contextmanager
def running(server: FakeServer, ports: Ports | None = None) -> Iterator[ServerInfo]:
    front = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(server, front)
    port = front.add_insecure_port(f"127.0.0.1:{ports.grpc if ports else 0}")
    with receiving(lambda *request: (200, server.page().encode()), ports.metrics if ports else 0) as address:
        front.start()
        open_ports = Ports(http=1, grpc=port, metrics=int(address.rpartition(":")[2]))
        try:
            yield ServerInfo(os.getpid(), "127.0.0.1", open_ports, str(server.repository), "", "")
        finally:
            front.stop(None).wait()


class Killed(BaseException):
    """Stands for the kill of a process: nothing in it can handle that."""


@contextmanager
def killed_at(number: int) -> Iterator[list[str]]:
    """Raise `Killed` just before the N-th change of a file or folder; gives the changes so far.

    The block ends without an error. It was killed if there are `number` changes.
    """
    changes: list[str] = []

    def watch(frame: Any, event: str, called: Any) -> None:
        if event != "c_call":
            return
        is_change = called.__module__ == "posix" and called.__name__ in CHANGES
        if is_change or (called.__name__ == "write" and isinstance(called.__self__, FileIO)):
            changes.append(called.__name__)
            if len(changes) == number:
                raise Killed

    sys.setprofile(watch)
    try:
        yield changes
    except Killed:
        pass
    finally:
        sys.setprofile(None)
