"""The command line and the environment of `tritonserver`."""

import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from nereid.backends.routing.assignment import ROUTE_THREADS
from nereid.base.assets import REPOSITORY
from nereid.base.config.server_flags import INSTANCES_BACKEND, SIGNALS_BACKEND
from nereid.base.contract import FORWARDED_HEADERS, GRPC_PORT, HTTP_PORT, METRICS_PORT, TOKEN_HEADER
from nereid.base.errors import ServerError
from nereid.base.tracing.records import TRACING_BACKEND, Sampling
from nereid.repository.repository_index import ROUTE, is_model, model_folders
from nereid.server import preflight
from nereid.server.installation import Installation, cuda_folders
from nereid.server.ports import Ports
from nereid.server.run_dir import LOOPBACK, socket_url

ENSEMBLE_PROFILE = "ensemble"
# A model without configs/cpu.pbtxt uses its plain config.pbtxt, so this default works for any repository.
DEFAULT_PROFILE = "cpu"
DEFAULT_PORTS = Ports(HTTP_PORT, GRPC_PORT, METRICS_PORT)
GPU_PROFILE = "gpu"
# The profile whose models pass tensors in GPU memory to each other.
GPU_ENSEMBLE_PROFILE = "gpu_ensemble"
TUNED_PROFILE = "tuned"
# Selects one of the other profiles for this machine: `nereid.server.gpu_profile`.
AUTO_PROFILE = "auto"
# The memory pool for tensors between ensemble steps cannot grow. Tensors that do not fit are copied through
# the host, and Triton logs that only once. Two batches of 64 images are 77 MB.
# Each GPU has its own pool; Triton ignores pools for absent GPUs (cuda_memory_manager.cc).
MAX_GPUS = 16
GPU_POOLS = tuple(f"--cuda-memory-pool-byte-size={gpu}:{512 * 2**20}" for gpu in range(MAX_GPUS))
# Callers of these APIs can read files, run code or stop the server: CVE-2025-23319.
SHARED_MEMORY = "shared-memory"
ADMIN_APIS = ("model-repository", SHARED_MEMORY, "trace", "logging")
LOOPBACK_HOSTS = (LOOPBACK, "localhost")
REGION_PREFIX = "shm-region-prefix-name="
READABLE_ON_LOOPBACK = ("model-config", "statistics")
# By default glibc returns an image tensor's buffer (0.6 MB) to the kernel after every request, and the page
# faults of the next request then cost about 0.3 ms of CPU per image (measured by hand, /proc).
KEEP_BUFFERS = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20)}

# Triton splits its flags at "=" and ":".
TOKEN = re.compile(r"[!-9;<>-~]{16,256}")
# tritonserver flags that open further addresses; it also accepts unambiguous prefixes.
LISTENING = ("http-address", "grpc-address", "allow-sagemaker", "allow-vertex-ai")
ADDRESSES = (*LISTENING, "metrics-address", "http-port", "grpc-port", "metrics-port")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of one server: its repository, profile, addresses and access; and of its supervision.

    Attributes:
        token: token of the administrative APIs; "" leaves them open.
        allow_shm: open the shared memory API to every caller.
        is_guarded: Triton listens only on sockets in a private folder, and a gateway listens on the ports.
        requires_keys: callers need a key even on loopback.
        allows_incomplete_configs: programs other than our commands may load models, so Triton must complete
            their configs.
        sampling: which traces to keep; None turns tracing off.
        measures_signals: measure signals of images and responses; see docs/drift.md.
        flags: passed to `tritonserver` unchanged.
        health_port: port of the supervisor's pages; 0 for any free one, None for none.
        drain_s: seconds to keep serving after the first signal, while `/readyz` already returns 503.
        is_strict: exit if a model cannot be loaded.
        keys: file with the keys of a guarded server's callers; None for the default file.
        otlp: address of an OTLP receiver over HTTP for kept traces, "" for none.
        logs_requests: whether each traced request is logged to stderr.
        gpu_ids: the GPUs to use, separated by commas; empty for all that CUDA can see.
    """

    repository: Path = REPOSITORY
    profile: str = ENSEMBLE_PROFILE
    host: str = "127.0.0.1"
    ports: Ports = DEFAULT_PORTS
    model_control_mode: str = "explicit"
    token: str = ""
    allow_shm: bool = False
    is_guarded: bool = False
    requires_keys: bool = False
    allows_incomplete_configs: bool = True
    sampling: Sampling | None = None
    measures_signals: bool = True
    flags: tuple[str, ...] = ()
    health_port: int | None = None
    drain_s: float = 0.0
    is_strict: bool = False
    keys: Path | None = None
    otlp: str = ""
    logs_requests: bool = False
    gpu_ids: str = ""


def command(
    options: ServerOptions,
    triton: Installation,
    backends: Path,
    run_id: str,
    models: Sequence[str] = ("*",),
    sockets: Path | None = None,
    instances: Mapping[str, int] | None = None,
    completes_configs: bool = True,
    traces: Path | None = None,
) -> list[str]:
    """Return the `tritonserver` command line for `options`.

    Args:
        run_id: distinguishes this server's shared memory from other servers'.
        models: models to load at startup in explicit mode, `*` for all.
        sockets: folder for Triton's sockets if the server is guarded; None for TCP ports.
        instances: number of instances of each model after startup, which its first instance must know.
        traces: socket for trace records; None if requests are not traced.
        completes_configs: whether Triton completes the configs of models on load, which takes a second.
    """
    args = [
        str(triton.server),
        f"--model-repository={options.repository}",
        f"--backend-directory={backends}",
        f"--model-control-mode={options.model_control_mode}",
        *_addresses(options, sockets),
        f"--http-header-forward-pattern={FORWARDED_HEADERS}",
        f"--grpc-header-forward-pattern={FORWARDED_HEADERS}",
        *_python_backends(triton, f"{run_id}-"),
    ]
    if traces and options.sampling:
        tracing = {
            "socket": traces,
            "share": f"{options.sampling.share:g}",
            "objective-ms": f"{options.sampling.objective_s * 1e3:g}",
        }
        args += [f"--backend-config={TRACING_BACKEND},{name}={value}" for name, value in tracing.items()]
    if not options.measures_signals:
        args.append(f"--backend-config={SIGNALS_BACKEND},measured=no")
    for name, count in (instances or {}).items():
        args.append(f"--backend-config={INSTANCES_BACKEND},{name}={count}")
    if options.model_control_mode == "explicit":
        args += [f"--load-model={name}" for name in models]
    if options.profile != ENSEMBLE_PROFILE:
        args.append(f"--model-config-name={options.profile}")
    if options.profile == GPU_ENSEMBLE_PROFILE:
        args += GPU_POOLS
    if not completes_configs:
        args.append("--disable-auto-complete-config")
    return [*args, *_restricted_apis(options), *options.flags]


def _python_backends(triton: Installation, prefix: str) -> Iterator[str]:
    yield f"--backend-config=python,{REGION_PREFIX}{prefix}"
    for name in (adapter.parent.name for adapter in triton.adapters):
        # Triton starts that many threads per instance to send its requests to other models. A route has
        # several requests at once, and each request to a variant occupies its thread.
        threads = ROUTE_THREADS if name == ROUTE else 1
        yield f"--backend-config={name},{REGION_PREFIX}{prefix}"
        yield f"--backend-config={name},thread-pool-size={threads}"


def _addresses(options: ServerOptions, sockets: Path | None) -> list[str]:
    names = [field.name for field in fields(Ports)]
    if sockets is None:
        addresses = [f"--{name}-address={options.host}" for name in names]
        return [*addresses, *(f"--{name}-port={getattr(options.ports, name)}" for name in names)]
    # Triton appends the port to the name of the gRPC socket.
    urls = {name: socket_url(sockets, name).removesuffix(f":{GRPC_PORT}") for name in names}
    return [*(f"--{name}-address={url}" for name, url in urls.items()), f"--grpc-port={GRPC_PORT}"]


def _restricted_apis(options: ServerOptions) -> list[str]:
    if not options.token:
        return []
    is_private = options.host in LOOPBACK_HOSTS or options.is_guarded
    closed = ADMIN_APIS if is_private else ADMIN_APIS + READABLE_ON_LOOPBACK
    apis = ",".join(api for api in closed if not (options.allow_shm and api == SHARED_MEMORY))
    return [
        f"--http-restricted-api={apis}:{TOKEN_HEADER}={options.token}",
        f"--grpc-restricted-protocol={apis}:{TOKEN_HEADER}={options.token}",
    ]


def environment(triton: Installation, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: its stubs find this virtual environment through PATH.

    Raises:
        ServerError: this Python has no shared library for the stub to embed.
    """
    here = preflight.PYTHON, preflight.library_folders()
    libpython = preflight.find_libpython(*here)
    if libpython is None:
        part, fix = preflight.missing(*here)[-1]
        raise ServerError(f"missing: {part}", fix)
    server_libraries = [str(triton.libraries or ""), str(libpython)]
    # Last, so that CUDA libraries of the machine or the image take precedence.
    libraries = [*server_libraries, inherited.get("LD_LIBRARY_PATH", ""), *map(str, cuda_folders())]
    return {
        **KEEP_BUFFERS,
        **inherited,
        "PATH": f"{Path(sys.executable).parent}:{inherited.get('PATH', '')}",
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
    }


def check_options(options: ServerOptions) -> None:
    """Check options before the server starts.

    Raises:
        ValueError: the repository or the profile does not exist, or callers could bypass the protection.
    """
    if options.is_guarded and options.allow_shm:
        raise ValueError("--allow-shm needs --unguarded: a gateway offers no shared memory")
    if options.is_guarded and (flags := [flag for flag in options.flags if _is_one_of(flag, ADDRESSES)]):
        raise ValueError(
            f"a guarded server chooses Triton's addresses, so it cannot be used with: {' '.join(flags)}"
        )
    if options.allow_shm and options.host not in LOOPBACK_HOSTS:
        raise ValueError(
            f"--allow-shm needs --host 127.0.0.1, got {options.host}: callers of the shared memory API can "
            "take over the model processes (CVE-2025-23319)"
        )
    if options.allow_shm and (flags := [flag for flag in options.flags if _is_one_of(flag, LISTENING)]):
        raise ValueError(
            f"--allow-shm is for {options.host} only, so it cannot be used with: {' '.join(flags)}"
        )
    repository, profile = options.repository, options.profile
    if not any(map(is_model, model_folders(repository) if repository.is_dir() else [])):
        raise ValueError(
            f"{repository} is not a model repository: expected MODEL/config.pbtxt or MODEL/1/model.onnx in "
            "it, found none"
        )
    known = {ENSEMBLE_PROFILE, *(path.stem for path in repository.glob("*/configs/*.pbtxt"))}
    if profile != DEFAULT_PROFILE and profile not in known:
        raise ValueError(f"no model has the profile '{profile}', expected one of: {', '.join(sorted(known))}")


def read_token(path: Path) -> str:
    """Return the text of a token file, without white space around it.

    Raises:
        ValueError: the file cannot be read, or its text cannot be a token.
    """
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--token-file '{path}': {getattr(error, 'strerror', None) or error}") from None
    if not (text and text.isascii() and text.isprintable()):  # it travels in a header
        problem = "other characters" if text else "an empty file"
        raise ValueError(f"--token-file '{path}': expected printable ASCII characters, got {problem}")
    return text


def read_own_token(path: Path) -> str:
    """Return the token for a server of this machine.

    Raises:
        ValueError: the file cannot be read, other users can read it, or its text is not a token.
    """
    text, mode = read_token(path), path.stat().st_mode
    if mode & 0o077:
        raise ValueError(
            f"--token-file '{path}': expected a file that only you can read, got mode "
            f"{stat.S_IMODE(mode):04o}; fix: chmod 600 {path}"
        )
    if not TOKEN.fullmatch(text):
        raise ValueError(
            f"--token-file '{path}': expected 16 to 256 printable ASCII characters without ' ', '=' and ':'"
        )
    return text


def _is_one_of(flag: str, names: Sequence[str]) -> bool:
    name = flag.removeprefix("--").partition("=")[0]
    return flag.startswith("--") and any(listed.startswith(name) for listed in names)
