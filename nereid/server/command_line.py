"""The command line and the environment of `tritonserver`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nereid.assets import REPOSITORY
from nereid.contract import GRPC_PORT, HTTP_PORT, METRICS_PORT, ROUTE_HEADERS, TOKEN_HEADER
from nereid.errors import ServerError
from nereid.routing.assignment import ROUTE_THREADS
from nereid.server import preflight
from nereid.server.ports import Ports
from nereid.server.wheel import Wheel

PLAIN_PROFILE = "ensemble"
# A model without configs/cpu.pbtxt serves its plain config.pbtxt, so this default suits every repository.
DEFAULT_PROFILE = "cpu"
DEFAULT_PORTS = Ports(HTTP_PORT, GRPC_PORT, METRICS_PORT)
GPU_PROFILE = "gpu"
# The pool for tensors between the steps of an ensemble cannot grow. Tensors that do not fit go through the
# host, and Triton logs that only once. Two batches of 64 images are 77 MB.
GPU_POOL = f"--cuda-memory-pool-byte-size=0:{512 * 2**20}"
# Callers of these APIs can read files, run code or stop the server: CVE-2025-23319.
SHARED_MEMORY = "shared-memory"
ADMIN_APIS = ("model-repository", SHARED_MEMORY, "trace", "logging")
LOOPBACK = ("127.0.0.1", "localhost")
REGION_PREFIX = "shm-region-prefix-name="
READABLE_ON_LOOPBACK = ("model-config", "statistics")
# By default glibc returns the buffer of an image's tensor (0.6 MB) to the kernel after every request. The
# page faults of the next request then cost about 0.3 ms of CPU per image (by hand, /proc).
KEEP_BUFFERS = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20)}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of one server: its repository, profile, addresses and access.

    `flags` are passed to `tritonserver` unchanged. `allow_shm` opens the shared memory API to every caller.
    """

    repository: Path = REPOSITORY
    profile: str = PLAIN_PROFILE
    host: str = "127.0.0.1"
    ports: Ports = DEFAULT_PORTS
    model_control_mode: str = "explicit"
    token: str = ""
    allow_shm: bool = False
    flags: tuple[str, ...] = ()


def command(
    options: ServerOptions, wheel: Wheel, backends: Path, run_id: str, models: Sequence[str] = ("*",)
) -> list[str]:
    """Return the `tritonserver` command line for `options`.

    Args:
        options, wheel: settings and parts of the server.
        backends: the backend directory.
        run_id: distinguishes the shared memory of this server from that of others.
        models: models to load at start in the explicit mode, `*` for all.
    """
    args = [
        str(wheel.server),
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
        f"--backend-config=python,{REGION_PREFIX}{region_prefix(run_id)}",
        # Each request to a variant holds a thread. Triton has one number for all Python backends, and starts
        # that many threads for every instance, hence the limit of a route's concurrent requests.
        f"--backend-config=python,thread-pool-size={ROUTE_THREADS}",
    ]
    if options.model_control_mode == "explicit":
        args += [f"--load-model={name}" for name in models]
    if options.profile != PLAIN_PROFILE:
        args.append(f"--model-config-name={options.profile}")
    if options.profile == GPU_PROFILE:
        args.append(GPU_POOL)
    return [*args, *_restricted_apis(options), *options.flags]


def _restricted_apis(options: ServerOptions) -> list[str]:
    if not options.token:
        return []
    loopback = options.host in LOOPBACK
    guarded = ADMIN_APIS if loopback else ADMIN_APIS + READABLE_ON_LOOPBACK
    apis = ",".join(api for api in guarded if not (options.allow_shm and api == SHARED_MEMORY))
    return [
        f"--http-restricted-api={apis}:{TOKEN_HEADER}={options.token}",
        f"--grpc-restricted-protocol={apis}:{TOKEN_HEADER}={options.token}",
    ]


def region_prefix(run_id: str) -> str:
    """Return the prefix of the names of a server's shared memory regions."""
    return f"{run_id}-"


def environment(wheel: Wheel, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: its stubs find this virtual environment through PATH.

    Raises:
        ServerError: this Python has no shared library for the stub to embed.
    """
    here = preflight.PYTHON, preflight.library_folders()
    libpython = preflight.find_libpython(*here)
    if libpython is None:
        what, fix = preflight.missing(*here)[-1]
        raise ServerError(f"missing: {what}", fix)
    libraries = [str(wheel.libraries), str(libpython), inherited.get("LD_LIBRARY_PATH", "")]
    return {
        **KEEP_BUFFERS,
        **inherited,
        "PATH": f"{Path(sys.executable).parent}:{inherited.get('PATH', '')}",
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
    }
