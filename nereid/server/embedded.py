"""Run the real `tritonserver` of the `nvidia-pytriton` wheel, without a container and without root."""

import contextlib
import ctypes
import functools
import http.client
import importlib.util
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from nereid.assets import ADAPTERS, COFFEE, REPOSITORY
from nereid.client.errors import tells_of_load
from nereid.repository import layout as repository
from nereid.routing.assignment import MOST_CALLS
from nereid.server import preflight
from nereid.server.server_log import ServerLog
from nereid.serving_errors import InvalidConfig

PLAIN_PROFILE = "ensemble"
# A model without configs/cpu.pbtxt serves its plain config.pbtxt, so this default suits every repository.
DEFAULT_PROFILE = "cpu"
GPU_PROFILE = "gpu"
# Tensors between an ensemble's steps lie in this pool, which cannot grow: what does not fit goes through the
# host, and Triton says so only once. Two batches of 64 images are 77 MB.
GPU_POOL = f"--cuda-memory-pool-byte-size=0:{512 * 2**20}"
# Exactly what a route reads, no other `x-` header: API keys are some, too.
ROUTE_HEADERS = "(?i)^x-(variant|model-version|route-[a-z0-9-]+)$"
# Whoever may call these can read files, run code or take the server down; see docs of CVE-2025-23319.
SHARED_MEMORY = "shared-memory"
ADMIN_APIS = ("model-repository", SHARED_MEMORY, "trace", "logging")
LOOPBACK = ("127.0.0.1", "localhost")
READABLE_ON_LOOPBACK = ("model-config", "statistics")
INSTALL = "pip install -e '.[embedded,cpu]'"
TOKEN_HEADER = "nereid-token"
STOP_TIMEOUT_S, STOP_LOOK_S = 40.0, 0.25
# A tensor of one image is 0.6 MB. By default glibc hands such a buffer back to the kernel after every
# request and pays page faults for the next: about 0.3 ms of CPU per image in the ensemble (by hand, /proc).
KEEP_BUFFERS = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20)}
SHARED_MEMORY_FOLDER = Path("/dev/shm")
_prctl = ctypes.CDLL(None).prctl
PR_SET_PDEATHSIG = 1
# Where the kernel says from which port on it takes those of outgoing connections.
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT, MOST_TRIES = 10_000, 64


class ServerError(Exception):
    """The server cannot be started, or died; the message has the reason and what mends it."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """Where the parts of the embedded server lie."""

    server: Path
    python_backend: Path
    stub: Path
    libraries: Path


@dataclass(frozen=True, slots=True)
class Ports:
    """The TCP ports of one server."""

    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What one server serves and where; `flags` are handed to `tritonserver` as they are.

    `allow_shm` lets whoever reaches the server have it map shared memory.
    """

    repository: Path = REPOSITORY
    profile: str = PLAIN_PROFILE
    host: str = "127.0.0.1"
    ports: Ports = Ports(8000, 8001, 8002)
    model_control_mode: str = "explicit"
    token: str = ""
    allow_shm: bool = False
    flags: tuple[str, ...] = ()


def find_wheel() -> Wheel:
    """Locate the embedded server in this interpreter's packages.

    Raises:
        ServerError: it is not installed, or has no stub for this Python.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.origin:
        raise ServerError(f"nvidia-pytriton is not installed; fix: {INSTALL}")
    package = Path(spec.origin).parent
    root = package / "tritonserver"
    stub = root / "python_backend_stubs" / preflight.PYTHON / "triton_python_backend_stub"
    if not stub.exists():
        have = ", ".join(sorted(path.name for path in stub.parent.parent.iterdir()))
        raise ServerError(f"nvidia-pytriton has no stub for Python {preflight.PYTHON}, it has: {have}")
    libraries = package.parent / "nvidia_pytriton.libs"
    return Wheel(root / "bin" / "tritonserver", root / "backends" / "python", stub, libraries)


def assemble_backends(wheel: Wheel, target: Path) -> Path:
    """Build Triton's backend directory in `target`: the wheel's `python` and our adapters.

    The stub is copied, not linked: Triton looks for it beside `libtriton_python.so`.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(wheel.python_backend, target / "python", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(wheel.stub, target / "python")
    for adapter in ADAPTERS.glob("*/model.py"):
        (target / adapter.parent.name).mkdir()
        shutil.copy2(adapter, target / adapter.parent.name)
    return target


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago; all are held open until the last is known.

    If possible, none that an outgoing connection may take before the server does.
    """
    first_outgoing = int(OUTGOING_PORTS.read_text().split()[0])
    own = range(min(FIRST_PORT, first_outgoing), first_outgoing)
    wanted = [*random.SystemRandom().sample(own, min(len(own), MOST_TRIES)), *[0] * count]
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in wanted:
            holder = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                holder.bind(("", port))
                found.append(holder.getsockname()[1])
            if len(found) == count:
                break
    return found


def command(
    options: ServerOptions, wheel: Wheel, backends: Path, server_id: str, models: Sequence[str] = ("*",)
) -> list[str]:
    """Return the `tritonserver` command line for `options`; the server tells `server_id` as its name.

    Args:
        models: what is loaded at start in the explicit mode, `*` for all.
    """
    args = [
        str(wheel.server),
        f"--id={server_id}",
        f"--model-repository={options.repository}",
        f"--backend-directory={backends}",
        f"--model-control-mode={options.model_control_mode}",
        f"--http-address={options.host}",
        f"--grpc-address={options.host}",
        f"--metrics-address={options.host}",
        f"--http-port={options.ports.http}",
        f"--grpc-port={options.ports.grpc}",
        f"--metrics-port={options.ports.metrics}",
        f"--http-header-forward-pattern={ROUTE_HEADERS}",
        f"--grpc-header-forward-pattern={ROUTE_HEADERS}",
        f"--backend-config=python,shm-region-prefix-name={region_prefix(server_id)}",
        # Each call of a variant holds a thread. Triton takes one number for all Python backends and starts
        # that many for every instance, which is why a route may not have more calls.
        f"--backend-config=python,thread-pool-size={MOST_CALLS}",
    ]
    if options.model_control_mode == "explicit":
        args += [f"--load-model={name}" for name in models]
    if options.profile != PLAIN_PROFILE:
        args.append(f"--model-config-name={options.profile}")
    if options.profile == GPU_PROFILE:
        args.append(GPU_POOL)
    if options.token:
        loopback = options.host in LOOPBACK
        guarded = ADMIN_APIS if loopback else ADMIN_APIS + READABLE_ON_LOOPBACK
        apis = ",".join(api for api in guarded if not (options.allow_shm and api == SHARED_MEMORY))
        args += [
            f"--http-restricted-api={apis}:{TOKEN_HEADER}={options.token}",
            f"--grpc-restricted-protocol={apis}:{TOKEN_HEADER}={options.token}",
        ]
    return [*args, *options.flags]


def region_prefix(server_id: str) -> str:
    """Return what the names of the shared memory regions of a server's stubs begin with."""
    return f"{server_id}-"


def environment(wheel: Wheel, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: its stubs find this virtual environment through PATH.

    Raises:
        ServerError: this Python has no shared library for the stub to embed.
    """
    here = preflight.PYTHON, preflight.library_folders()
    libpython = preflight.find_libpython(*here)
    if libpython is None:
        raise ServerError("; ".join(preflight.missing(*here)))
    libraries = [str(wheel.libraries), str(libpython), inherited.get("LD_LIBRARY_PATH", "")]
    return {
        **KEEP_BUFFERS,
        **inherited,
        "PATH": f"{Path(sys.executable).parent}:{inherited.get('PATH', '')}",
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
    }


class EmbeddedServer:
    """One `tritonserver` process group; as a context manager it is ready inside and gone after.

    Args:
        options: what to serve, and where.
        run_dir: a folder of this server's own; the backend directory is assembled in it.
        inherited: the environment to start from.
        log: called with every line of the server's log that is worth showing.
        among: the only models that are loaded at start in the explicit mode; None for all of the profile.
    """

    def __init__(
        self,
        options: ServerOptions,
        run_dir: Path,
        inherited: Mapping[str, str],
        log: Callable[[str], None] = lambda line: None,
        among: Collection[str] | None = None,
    ) -> None:
        self.options = options
        self.log = ServerLog(log)
        self._run_dir = run_dir
        self._inherited = inherited
        self._among = among
        self._models: Sequence[str] = ()
        # By its name the server is told from another one that took the same port in between.
        self.id = f"nereid-{secrets.token_hex(8)}"
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of `tritonserver`, which leads its own process group."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def start(self) -> None:
        """Start the process; it ends when the starting thread does, even if that is killed.

        Raises:
            ServerError: a part is missing, or a port is taken.
        """
        wheel = find_wheel()
        _check_ports(self.options)
        backends = assemble_backends(wheel, self._run_dir / "backends")
        # Looked up once: while the server starts, models may come or go.
        models = _models_to_load(self.options)
        self._models = [name for name in models if self._among is None or name in self._among]
        self._process = subprocess.Popen(
            command(self.options, wheel, backends, self.id, self._models),
            env=environment(wheel, self._inherited),
            cwd=self._run_dir,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=functools.partial(end_with_parent, os.getpid()),
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def wait_ready(self, timeout_s: float = 180.0) -> None:
        """Return when every model that takes an `image` has classified one.

        Raises:
            ServerError: the server died, a model failed to load, or `timeout_s` passed.
        """
        deadline = time.monotonic() + timeout_s
        for path, body, expected in [
            ("/v2", None, f'"name":"{self.id}"'),
            ("/v2/health/ready", None, ""),
            *((infer_path(name), COFFEE.read_bytes(), "") for name in self._image_models()),
        ]:
            while (refusal := self._ask(path, body, expected)) is not None:
                self._raise_if_ended()
                if time.monotonic() > deadline:
                    late = f"not ready after {timeout_s:.0f} s, {path} says: {refusal}"
                    raise ServerError(f"{late}\n{self.log.tail()}")
                time.sleep(0.05)
        self._raise_if_ended()

    def poll(self) -> int | None:
        """Return the exit status, or None while the server runs."""
        return self._process.poll() if self._process else None

    def wait(self) -> int:
        """Wait for the server to end by itself; returns its exit status."""
        assert self._process is not None, "the server was not started"
        return self._process.wait()

    def probe(self, model: str, timeout_s: float) -> str | None:
        """Ask a model to classify an image; returns None if it does, else what came instead.

        Load is no failure: who is taken away because of it leaves it to the next.
        """
        refusal = self._ask(infer_path(model), COFFEE.read_bytes(), "", timeout_s)
        return None if refusal and tells_of_load(refusal) else refusal

    def probe_server(self, timeout_s: float) -> str | None:
        """Ask the server whether it is ready; returns None if it is, else what came instead."""
        return self._ask("/v2/health/ready", None, "", timeout_s)

    def stop(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """End the process group: Triton gets `STOP_TIMEOUT_S` to finish its requests, then all are killed.

        No shared memory of theirs is left.

        Args:
            is_done: asked from time to time; true ends the waiting.
        """
        if self._process is None:
            return
        deadline = time.monotonic() + STOP_TIMEOUT_S
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
            while self._process.poll() is None and time.monotonic() < deadline and not is_done():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_LOOK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._drain_log()
            # A stub that is killed leaves its region behind.
            for region in SHARED_MEMORY_FOLDER.glob(f"{region_prefix(self.id)}*"):
                region.unlink(missing_ok=True)

    def _raise_if_ended(self) -> None:
        if self.poll() is not None:
            self._drain_log()
            raise ServerError(self.log.reason())

    def _image_models(self) -> list[str]:
        return [name for name in image_models(self.options) if name in self._models]

    def _ask(self, path: str, body: bytes | None, expected: str, timeout_s: float = 30.0) -> str | None:
        """Return None if the server answers 200 with `expected` in it, else what it said instead."""
        connection = http.client.HTTPConnection(self.options.host, self.options.ports.http, timeout=timeout_s)
        try:
            headers = {"Inference-Header-Content-Length": "0"} if body else {}
            connection.request("POST" if body else "GET", path, body, headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            right = response.status == http.HTTPStatus.OK and expected in text
            return None if right else f"{response.status} {text}"
        except (OSError, http.client.HTTPException) as error:
            return str(error)
        finally:
            connection.close()

    def _read_log(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.log.add(line.rstrip("\n"))

    def _drain_log(self) -> None:
        if self._reader:
            self._reader.join(timeout=5)


def why_unusable(host: str, port: int) -> str | None:
    """Return why nothing can listen on `host` and `port`, or None if that is possible."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _check_ports(options: ServerOptions) -> None:
    for name in ("http", "grpc", "metrics"):
        port = getattr(options.ports, name)
        if reason := why_unusable(options.host, port):
            raise ServerError(
                f"{name} port {port} on {options.host} cannot be used: {reason}; "
                f"fix: choose another with --{name}-port, 0 for any free one, or another --host"
            )


def _models_to_load(options: ServerOptions) -> list[str]:
    """Return what the server is told to load: all, but for what this profile has no use for."""
    try:
        hidden = repository.hidden_models(options.repository, options.profile)
        return sorted(repository.configs(options.repository, options.profile).keys() - hidden)
    except InvalidConfig:  # Triton says it better, and ends
        return ["*"]


def image_models(options: ServerOptions) -> list[str]:
    """Return the models on disk whose only input is an encoded `image`."""
    documents = repository.readable_configs(options.repository, options.profile)
    return [name for name, document in documents.items() if _inputs(document) == [("image", "TYPE_STRING")]]


def _inputs(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(each["name"], each["data_type"]) for each in document.get("input", ())]


def infer_path(model: str) -> str:
    """Return where a model is asked over HTTP."""
    return f"/v2/models/{model}/infer"


def end_with_parent(parent: int) -> None:
    """Have this process, as it starts, end with the one that started it, even if that is killed."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the request was made
        os._exit(1)
