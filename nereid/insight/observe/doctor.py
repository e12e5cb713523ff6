"""`nereid doctor`: checks of this machine for the embedded server, each failure with its fix."""

import contextlib
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from nereid.backends.triton import stub_memory
from nereid.base.assets import REPOSITORY
from nereid.base.errors import InvalidConfig, ServerError
from nereid.base.units import format_bytes
from nereid.insight.observe import gpu_findings
from nereid.insight.observe.gpu_findings import Finding
from nereid.repository.instance_sizing import Machine, plan_instances
from nereid.repository.repository_index import describe_threads, thread_budget
from nereid.server import gpu_profile, nvidia_smi, preflight, run_dir
from nereid.server.command_line import ServerOptions, environment
from nereid.server.gpu_profile import GpuPackages
from nereid.server.installation import FOLDER, INSTALL, find_installation
from nereid.server.ports import why_unusable
from nereid.server.run_dir import ServerInfo

# nvidia-pytriton does not state its Triton release. An end-to-end test compares with the server's version.
TRITON_OF_PYTRITON = {"0.7.0": "2.51.0 (24.10)"}
# Every stub maps a region of 1 MB that grows with the tensors in flight; Docker's default is 64 MB.
MIN_SHM_BYTES = 256 * 2**20
# Each connection of the gateway is an open file. Many clients that connect together wait to be accepted.
MIN_FILES, MIN_WAITING = 8192, 1024
SOMAXCONN = Path("/proc/sys/net/core/somaxconn")
# Debian's packages of the libraries that a stub links and a minimal system may lack.
PACKAGES = {"libz.so.1": "zlib1g", "libexpat.so.1": "libexpat1", "libstdc++.so.6": "libstdc++6"}


def diagnose(inherited: Mapping[str, str], repository: Path = REPOSITORY) -> Iterator[Finding]:
    """Run all checks for serving `repository`; the environment `inherited` locates running servers."""
    yield _python()
    yield _triton(inherited)
    yield _stub_libraries(inherited)
    yield _onnxruntime()
    yield _shared_memory()
    yield _regions()
    yield _connections()
    yield from _gpus(inherited, repository)
    running = run_dir.find(run_dir.root(inherited), repository)
    if running:
        address = running.url("http")
        yield Finding("server", "ok", f"process {running.pid} serves this repository on {address}")
    profile = running.profile if running else gpu_profile.choose(repository, inherited).profile
    options = ServerOptions(repository, profile=profile)
    yield _threads(options)
    for name, port in asdict(options.ports).items():
        yield _port(name, options.host, port, running)


def _python() -> Finding:
    here = preflight.PYTHON, preflight.library_folders()
    if missing := preflight.missing(*here):
        part, fix = missing[0]
        return Finding("Python", "fail", f"missing: {part}", fix)
    return Finding("Python", "ok", f"{here[0]}, shared library in {preflight.find_libpython(*here)}")


def _triton(inherited: Mapping[str, str]) -> Finding:
    try:
        installation = find_installation(inherited)
    except ServerError as error:
        return Finding("Triton", "fail", error.reason, error.fix)
    if FOLDER in inherited:
        return Finding("Triton", "ok", f"{installation.server}, named by {FOLDER}")
    version = gpu_profile.version_of("nvidia-pytriton")
    triton = TRITON_OF_PYTRITON.get(version, "unknown")
    return Finding("Triton", "ok", f"{triton} in nvidia-pytriton {version}, with a stub for this Python")


def _stub_libraries(inherited: Mapping[str, str]) -> Finding:
    check = "stub's libraries"
    try:
        installation = find_installation(inherited)
        variables = environment(installation, inherited)
        linked = subprocess.run(
            ["ldd", installation.stub], env=variables, capture_output=True, text=True, check=True
        ).stdout
    except ServerError as error:
        return Finding(check, "fail", error.reason, error.fix)
    except (OSError, subprocess.CalledProcessError) as error:
        return Finding(check, "note", f"not checked, ldd failed: {error}")
    missing = [line.split()[0] for line in linked.splitlines() if "not found" in line]
    if missing:
        packages = " ".join(PACKAGES.get(library, library) for library in missing)
        return Finding(check, "fail", f"not found: {', '.join(missing)}", f"apt-get install {packages}")
    return Finding(check, "ok", "all found")


def _onnxruntime() -> Finding:
    try:
        import onnxruntime
    except ImportError:
        return Finding("ONNX Runtime", "fail", "not installed", INSTALL)
    installed = GpuPackages.detect()
    if len(installed.runtimes) > 1:
        fix = gpu_profile.install_command(installed.cuda) if installed.cupy else INSTALL
        return Finding("ONNX Runtime", "fail", *gpu_profile.conflict(installed.runtimes, fix))
    providers = ", ".join(onnxruntime.get_available_providers())
    return Finding("ONNX Runtime", "ok", f"{onnxruntime.__version__} with {providers}")


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding("/dev/shm", "fail", "missing", "mount -t tmpfs tmpfs /dev/shm")
    free = shutil.disk_usage("/dev/shm").free
    if free < MIN_SHM_BYTES:
        fix = "mount -o remount,size=1g /dev/shm, in a container --shm-size=1g"
        return Finding("/dev/shm", "note", f"{format_bytes(free)} free: large batches may not fit", fix)
    return Finding("/dev/shm", "ok", f"{format_bytes(free)} free")


def _connections() -> Finding:
    """Check how many connections the gateway can have, and how many may wait to be accepted."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = int(SOMAXCONN.read_text())
    text = f"{files:,} open files, {waiting:,} waiting connections"
    if 0 <= files < MIN_FILES:
        return Finding("connections", "note", text, f"ulimit -n {MIN_FILES}, or LimitNOFILE of the service")
    if waiting < MIN_WAITING:
        return Finding("connections", "note", text, f"sysctl net.core.somaxconn={MIN_WAITING}")
    return Finding("connections", "ok", text)


def _regions() -> Finding:
    """Remove the shared memory of killed servers."""
    check = "shared memory regions"
    if servers := stub_memory.remove_stale():
        return Finding(check, "note", f"removed the regions of {len(servers)} killed servers")
    return Finding(check, "ok", "none left over")


def _gpus(inherited: Mapping[str, str], repository: Path) -> Iterator[Finding]:
    servers = []
    variables = inherited
    with contextlib.suppress(ServerError):  # reported by another check
        servers = [server.pid for server in run_dir.find_all(run_dir.root(inherited))]
        variables = environment(find_installation(inherited), inherited)
    yield from gpu_findings.diagnose_gpus(variables, servers)
    if nvidia_smi.why_absent(inherited.get("PATH", "")):
        return
    choice = gpu_profile.choose(repository, inherited)
    yield Finding("profile", "ok", f"nereid serve selects '{choice.profile}': {choice.reason}", choice.fix)


def _threads(options: ServerOptions) -> Finding:
    try:
        chosen = plan_instances(options.repository, options.profile, Machine.detect())
        budget = thread_budget(options.repository, options.profile, chosen.counts)
        text, fits = describe_threads(budget)
    except InvalidConfig as error:
        return Finding("threads", "fail", str(error), "nereid check")
    fix = "" if fits else "fewer instances, or a smaller intra_op_thread_count, in config.pbtxt"
    text = f"{text}; {chosen}" if chosen.counts else text
    return Finding("threads", "ok" if fits else "note", text, fix)


def _port(name: str, host: str, port: int, running: ServerInfo | None) -> Finding:
    check = f"{name} port"
    if running and getattr(running.ports, name) == port:
        return Finding(check, "ok", f"{port} is in use by this repository's server")
    if reason := why_unusable(host, port):
        return Finding(check, "note", f"{port} cannot be used: {reason}", f"nereid serve --{name}-port 0")
    return Finding(check, "ok", f"{port} is free")
