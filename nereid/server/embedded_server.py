"""One `tritonserver` process group: its models, startup, probes and shutdown."""

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from nereid.backends.triton.stub_memory import StubMemory
from nereid.base.addresses import open_http
from nereid.base.assets import COFFEE
from nereid.base.config.instance_bounds import read_bounds
from nereid.base.config.model_config import with_instances
from nereid.base.contract import IMAGE, PROBE_HEADER, TOKEN_HEADER
from nereid.base.errors import InvalidConfig, ServerError
from nereid.base.processes import ReachedLimits, end_with_parent
from nereid.base.tracing.records import Sampling
from nereid.client.client_errors import is_overload
from nereid.repository import checksums
from nereid.repository.instance_sizing import BACKENDS, InstancePlan, Machine, plan_instances
from nereid.repository.repository_index import (
    model_folders,
    readable_configs,
    served_steps,
    served_versions,
    steps_of,
    unused_models,
)
from nereid.repository.triton_rules import are_complete, fatal_problem
from nereid.server.command_line import LOOPBACK_HOSTS, ServerOptions, command, environment
from nereid.server.installation import Installation, assemble_backends, find_installation
from nereid.server.model_control import LOAD_TIMEOUT_S, NotReached
from nereid.server.ports import check_ports, is_listening, widen_receive_buffers
from nereid.server.request_traces import RECORDS_FILE
from nereid.server.run_dir import ServerInfo, make_socket_folder, socket_folder, trace_socket
from nereid.server.server_log import ServerLog

Documents = Mapping[str, Mapping[str, Any]]
RESTORE = "restore the file, or publish it as a new version"
STOP_TIMEOUT_S, STOP_POLL_S, LOAD_POLL_S = 40.0, 0.25, 1.0


def unservable_models(options: ServerOptions) -> dict[str, str]:
    """Return the models that must not be loaded, with the reasons.

    Loading them would keep Triton from serving, their instance bounds are invalid, or a file of a published
    version has changed on disk.
    """
    repository, profile = options.repository, options.profile
    documents, hidden = readable_configs(repository, profile), unused_models(repository, profile)
    damage = cache(checksums.damage)
    reasons = {}
    for name, document in documents.items():
        if name in hidden:
            continue
        if problem := fatal_problem(repository / name, document) or _bounds_problem(document):
            reasons[name] = f"model '{name}': {problem}"
            continue
        needed = [(name, version) for version in served_versions(repository / name, document)]
        for model, version in [*needed, *steps_of(document)]:
            if problem := damage(repository / model / str(version)):
                text = f"version {version} of '{model}' is damaged: {problem}; fix: {RESTORE}"
                reasons[name] = f"model '{name}': {text}"
    # Triton would still load an excluded model for an ensemble that runs it, directly or indirectly.
    while above := dict(_dependents_of(reasons, documents)):
        reasons |= above
    return {name: reason for name, reason in reasons.items() if name not in hidden}


def _bounds_problem(document: Mapping[str, Any]) -> str:
    try:
        read_bounds(document)
    except InvalidConfig as error:
        return str(error)
    return ""


def _dependents_of(unserved: Mapping[str, str], documents: Documents) -> Iterator[tuple[str, str]]:
    """Yield the other models that depend on models that are not served, with the reasons."""
    for name, document in documents.items():
        steps = () if name in unserved else served_steps(document)
        if step := next((model for model, _ in steps if model in unserved), None):
            yield name, f"model '{name}': its step '{step}' is not served"


class EnvironmentFolders:
    """The environment folders of one server, recorded when it is ready.

    Triton 24.10 creates an empty one for each Python-based backend, regardless of TMPDIR. If a /tmp cleaner
    has removed one, Triton aborts during shutdown.

    Source: triton-inference-server/python_backend r24.10, `EnvironmentManager` in `src/pb_env.cc`.
    """

    def __init__(self, parent: Path = Path("/tmp")) -> None:
        self._parent, self._own = parent, set[Path]()
        self._before = self._present()

    def note(self) -> None:
        """Record the folders created since construction, also by servers started meanwhile."""
        self._own = self._present() - self._before

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Recreate missing folders inside the context, while the server stops."""
        missing = [folder for folder in self._own if not folder.exists()]
        for folder in missing:
            folder.mkdir(mode=0o700, exist_ok=True)
        yield
        for folder in missing:
            with contextlib.suppress(OSError):  # Triton has removed it
                folder.rmdir()

    def _present(self) -> set[Path]:
        return {*self._parent.glob("python_env_*")}


class EmbeddedServer:
    """One `tritonserver` process group; a context manager that starts, awaits and stops it.

    Args:
        run_dir: an empty folder; the backend directory is assembled in it.
        only_models: models to load at startup in explicit mode; None for all models of the profile.
        excluded_models: models not to load at startup in explicit mode.
    """

    def __init__(
        self,
        options: ServerOptions,
        run_dir: Path,
        inherited: Mapping[str, str],
        log: Callable[[str], None] = lambda line: None,
        only_models: Collection[str] | None = None,
        excluded_models: Collection[str] = (),
    ) -> None:
        self.options = options
        self.log = ServerLog(log)
        self._run_dir = run_dir
        self._sockets = socket_folder(run_dir) if options.is_guarded else None
        self._inherited = inherited
        self._traces = trace_socket(run_dir) if options.sampling else None
        self._only_models, self._excluded_models = only_models, excluded_models
        self._completes_configs = True
        self.models: Sequence[str] = ()  # to load at start
        self.instance_plan = InstancePlan(Machine.detect(), {}, False)
        self._fitted_backends: tuple[str, ...] = ()
        # Distinguishes this server's shared memory from other servers'.
        self.id = f"nereid-{secrets.token_hex(8)}"
        self.memory = StubMemory(self.id)
        self._environments = EnvironmentFolders()
        self._limits = ReachedLimits()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> "EmbeddedServer":
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of `tritonserver`, which leads its own process group."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def info(self) -> ServerInfo:
        """Return how other commands reach this server."""
        options = self.options
        sampling = options.sampling or Sampling(0.0, 0.0)
        return ServerInfo(
            self.pid,
            options.host,
            options.ports,
            str(options.repository),
            options.profile,
            options.token,
            health_port=options.health_port or 0,
            model_control_mode=options.model_control_mode,
            sockets=str(self._sockets or ""),
            cores=self.instance_plan.machine.cores if self._fitted_backends else 0,
            fitted_backends=self._fitted_backends,
            completes_configs=self._completes_configs,
            traces=str(self._traces or ""),
            records=str(self._run_dir / RECORDS_FILE) if self._traces else "",
            trace_share=sampling.share,
            objective_ms=sampling.objective_s * 1e3,
        )

    def start(self) -> None:
        """Start the process, which ends with the starting thread even if that is killed.

        Raises:
            ServerError: a part is missing, or a port is taken.
        """
        triton = find_installation(self._inherited)
        repository, profile = self.options.repository, self.options.profile
        if self._sockets:
            make_socket_folder(self._sockets)
        else:
            check_ports(self.options.host, self.options.ports)
        backends = assemble_backends(triton, self._run_dir / "backends")
        # Listed only once, because models may be added or removed while the server starts.
        hidden = unused_models(repository, profile)
        models = [folder.name for folder in model_folders(repository) if folder.name not in hidden]
        requested_models = [name for name in models if self._only_models is None or name in self._only_models]
        self.models = [name for name in requested_models if name not in self._excluded_models]
        self._fit(triton)
        if self.options.model_control_mode == "explicit" and not self.options.allows_incomplete_configs:
            # Excluded models also count, because they may be loaded once they are repaired.
            self._completes_configs = not are_complete(repository, profile, models)
        self.memory.claim()
        self._process = subprocess.Popen(
            command(
                self.options,
                triton,
                backends,
                self.id,
                self.models,
                self._sockets,
                self.instance_plan.counts,
                self._completes_configs,
                self._traces,
            ),
            env=environment(triton, self._inherited),
            cwd=self._run_dir,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def wait_ready(self, timeout_s: float = 180.0) -> None:
        """Return when every model that takes an `image` has classified one.

        Raises:
            ServerError: the server died, a model failed to load, or `timeout_s` passed; if the reason is
                unknown, a note on the error contains the end of the log.
        """
        deadline = time.monotonic() + timeout_s
        models = [name for name in image_models(self.options) if name in self.models]
        for path, body in [
            ("/v2/health/ready", None),
            *((infer_path(name), COFFEE.read_bytes()) for name in models),
        ]:
            while (refusal := self._own_request(path, body)) is not None:
                self._raise_if_ended()
                if time.monotonic() > deadline:
                    late = ServerError(f"not ready after {timeout_s:.0f} s, {path} returned: {refusal}")
                    late.add_note(self.log.tail())
                    raise late
                time.sleep(0.05)
            self.memory.protect()
        self._raise_if_ended()
        self._environments.note()
        if self.options.host in LOOPBACK_HOSTS and not self._sockets:
            widen_receive_buffers(self.pid, self.options.ports.http)
        self._start_instances()

    def _fit(self, triton: Installation) -> None:
        if self.options.model_control_mode != "explicit":
            return
        # NVIDIA's backend lets each instance use all cores.
        installed = {adapter.parent.name for adapter in triton.adapters}
        self._fitted_backends = tuple(sorted(BACKENDS & installed))
        repository, profile = self.options.repository, self.options.profile
        plan = plan_instances(repository, profile, self.instance_plan.machine, self._fitted_backends)
        counts = {name: count for name, count in plan.counts.items() if name in self.models}
        self.instance_plan = replace(plan, counts=counts)

    def _start_instances(self) -> None:
        """Start the chosen numbers of instances; Triton itself has started those in the configs.

        This uses HTTP, which blocks other requests while it loads, but no client knows this server yet.
        """
        documents = readable_configs(self.options.repository, self.options.profile)
        headers = {TOKEN_HEADER: self.options.token} if self.options.token else {}

        def start(name: str, count: int) -> None:
            parameters = {"config": json.dumps(with_instances(documents[name], count))}
            path, body = f"/v2/repository/models/{name}/load", json.dumps({"parameters": parameters})
            status, text = self._exchange(path, body.encode(), headers, LOAD_TIMEOUT_S)
            if status != http.HTTPStatus.OK:
                raise self.log.refused_load(name, text.decode(errors="replace"))

        pool = ThreadPoolExecutor(self.instance_plan.machine.cores)
        try:
            pending = {pool.submit(start, *chosen) for chosen in self.instance_plan.counts.items()}
            while pending:
                done, pending = wait(pending, LOAD_POLL_S, FIRST_COMPLETED)
                for load in done:
                    load.result()
                self._raise_if_ended()
        finally:  # a signal must not wait for loads
            pool.shutdown(wait=False, cancel_futures=True)
        self.memory.protect()

    def poll(self) -> int | None:
        """Return the exit status, or None while the server runs."""
        return self._process.poll() if self._process else None

    def probe(self, model: str, timeout_s: float) -> str | None:
        """Classify an image with a model; return None on success, else the reason for the failure.

        Overload is not a failure. Removing this server from rotation would push its load onto the next one.
        """
        refusal = self._request(infer_path(model), COFFEE.read_bytes(), timeout_s)
        return None if refusal and is_overload(refusal) else refusal

    def probe_server(self, timeout_s: float) -> str | None:
        """Check the server's own readiness; return None on success, else the reason for the failure."""
        return self._request("/v2/health/ready", None, timeout_s)

    def statistics(self, timeout_s: float) -> dict[str, Any]:
        """Return Triton's statistics of all models that are ready.

        Raises:
            NotReached: the server does not respond.
        """
        try:
            headers = {TOKEN_HEADER: self.options.token} if self.options.token else {}
            status, body = self._exchange("/v2/models/stats", None, headers, timeout_s)
            statistics: dict[str, Any] = json.loads(body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NotReached(f"the server does not respond: {error}") from None
        if status != http.HTTPStatus.OK:
            raise NotReached(f"the server's statistics: {status} {body.decode(errors='replace')}")
        return statistics

    def stop(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """Stop the process group and remove its shared memory.

        Triton has `STOP_TIMEOUT_S` to finish its requests, or less if `is_done` returns true; any remaining
        processes are then killed.
        """
        if self._process is None:
            return
        deadline = time.monotonic() + STOP_TIMEOUT_S
        try:
            with self._environments.kept():
                if self._process.poll() is None:
                    self._process.send_signal(signal.SIGTERM)
                while self._process.poll() is None and time.monotonic() < deadline and not is_done():
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(STOP_POLL_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._drain_log()
            # A killed stub leaves its region behind.
            self.memory.remove()
            if self._sockets:
                shutil.rmtree(self._sockets, ignore_errors=True)

    def _raise_if_ended(self) -> None:
        # Triton and its models wait forever for a thread that did not start.
        if refused := self._limits.new_refusals():
            raise ServerError(refused)
        if self.poll() is not None:
            self._drain_log()
            raise self.log.failure()

    def _own_request(self, path: str, body: bytes | None) -> str | None:
        """Send a request like `_request`, unless another server has taken the port in the meantime."""
        port = self.options.ports.http
        if self._process is None or not (self._sockets or is_listening(self.pid, port)):
            return f"this server does not listen on port {port} yet"
        return self._request(path, body)

    def _request(self, path: str, body: bytes | None, timeout_s: float = 30.0) -> str | None:
        headers = {"Inference-Header-Content-Length": "0", PROBE_HEADER: "1"} if body else {}
        try:
            status, text = self._exchange(path, body, headers, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            return str(error)
        return None if status == http.HTTPStatus.OK else f"{status} {text.decode(errors='replace')}"

    def _exchange(
        self, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        with contextlib.closing(open_http(self.info().url("http"), timeout_s)) as connection:
            connection.request("POST" if body else "GET", path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()

    def _read_log(self) -> None:
        assert self._process and self._process.stdout  # noqa: PT018
        with self._process.stdout as lines:
            for line in lines:
                self.log.add(line.rstrip("\n"))

    def _drain_log(self) -> None:
        if self._reader:
            self._reader.join(timeout=5)


def image_models(options: ServerOptions) -> list[str]:
    """Return the models on disk whose only input is an encoded `image`."""
    documents = readable_configs(options.repository, options.profile)
    inputs = {name: document.get("input", ()) for name, document in documents.items()}
    image_fields = {"name": IMAGE, "data_type": "TYPE_STRING"}.items()
    return [
        name for name, tensors in inputs.items() if len(tensors) == 1 and image_fields <= tensors[0].items()
    ]


def infer_path(model: str) -> str:
    """Return the HTTP path of a model's inference requests."""
    return f"/v2/models/{model}/infer"
