"""`nereid serve` and related commands as a user runs them: processes, streams, signals and exit codes."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import tritonclient.grpc

from nereid.base.assets import COFFEE, REPOSITORY
from nereid.base.errors import ServerError
from nereid.server import run_dir
from nereid.server.embedded_server import EmbeddedServer
from nereid.server.ports import free_ports
from tests.commands import captured
from tests.e2e.conftest import TOKEN, group_members, url
from tests.routes import WATCHDOG_S, wait_until
from tests.supervised import ANY_PORTS, NEREID, nereid, serving
from tests.tables import cases

PROCESSES = Path("/sys/fs/cgroup/pids")


@pytest.fixture
def environment(tmp_path):
    return os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    with serving(REPOSITORY, tmp_path_factory.mktemp("asked") / "run") as running:
        yield running


def test_served_repository_is_found_and_used(asked):
    server_info = asked.server_info
    assert (asked.ports["http"], asked.ports["grpc"]) == (server_info.ports.http, server_info.ports.grpc)
    assert (server_info.profile, server_info.repository) == ("cpu", str(REPOSITORY))
    assert len(server_info.token) >= 24

    for protocol in ("http", "grpc"):
        done = asked.nereid("classify", str(COFFEE), "--protocol", protocol, "--json")
        (answer,) = json.loads(done.stdout)
        assert (done.returncode, answer["labels"][0]["name"]) == (0, "espresso")

    assert 'nv_inference_count{model="classify_v1",version="1"}' in asked.triton_page()
    if not Path("/proc/driver/nvidia/version").exists():
        log = asked.log
        assert log.count("no GPU: serving on the CPU") == 1
        assert "NVML" not in log.replace("Triton's CUDA, NVML and DCGM warnings", "")


def test_second_server_of_a_repository_is_told_of_the_first(asked):
    done = asked.nereid("serve", "--http-port", str(asked.ports["http"]))

    assert done.returncode == 1
    assert (
        f"is already running on port {asked.ports['http']}: pid {asked.server_info.pid}; fix: " in done.stderr
    )


def test_profile_loads_only_what_it_serves(asked):
    """Profile `cpu` runs the networks in its fused models, so models of ensembles stay unloaded."""
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{asked.ports['grpc']}")

    ready = {name for path in REPOSITORY.glob("*/1") if client.is_model_ready(name := path.parent.name)}

    assert ready == {"classify", "classify_v1", "classify_v2"}
    assert asked.log.startswith("profile cpu: no NVIDIA GPU\n")
    assert "network threads on" in asked.log


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGINT, ["--unguarded"]), pytest.param(signal.SIGTERM, ["--guard"], marks=pytest.mark.slow)],
    ids=["ctrl-c", "sigterm"],
)
def test_signal_ends_every_process(tmp_path, number, words):
    with serving(REPOSITORY, tmp_path / "run", *words) as served:
        leader = served.server_info.pid
        assert len(group_members(leader)) > 5, "server and stubs"
        children = psutil.Process(served.process.pid).children()  # the server, and a gateway

        served.process.send_signal(number)

        assert served.process.wait(WATCHDOG_S) == 0
        assert "Waiting for in-flight requests to complete" in served.log
    assert [child for child in children if child.is_running()] == group_members(leader) == []
    assert run_dir.find(served.base, REPOSITORY) is None
    assert list(served.base.glob("*/*")) == []


@pytest.mark.nightly(minutes=1)
def test_start_waits_for_a_server_without_supervisor(environment, tmp_path):
    """A killed supervisor leaves a server that answers its last requests; the next one on its ports waits."""
    ports = free_ports(3)
    names = ("http", "grpc", "metrics")
    words = [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]

    def start(name: str) -> subprocess.Popen:
        with (tmp_path / f"{name}.log").open("w") as log, (tmp_path / name).open("w") as ready:
            process = subprocess.Popen([NEREID, "serve", *words], env=environment, stdout=ready, stderr=log)
        wait_until(lambda: (tmp_path / name).read_text() or process.poll() is not None)
        assert process.poll() is None, (tmp_path / f"{name}.log").read_text()[-3000:]
        return process

    first = start("first")
    leader = run_dir.find(run_dir.root(environment), REPOSITORY).pid
    # Triton waits for connections that send no request.
    with socket.create_connection(("127.0.0.1", ports[0])):
        first.kill()
        first.wait()
        second = start("second")
    try:
        log = (tmp_path / "second.log").read_text()
        assert f"waiting for the server with pid {leader} to exit; its supervisor was killed" in log
        assert group_members(leader) == []
    finally:
        second.terminate()
        second.wait(WATCHDOG_S)


@pytest.mark.slow
def test_server_may_open_as_many_files_as_the_system_allows(environment, tmp_path):
    """The soft limit becomes the hard one; a limit that is too low is named, with the command."""
    low = captured(["prlimit", "--nofile=100:100", NEREID, "serve"], env=environment)
    with serving(REPOSITORY, tmp_path / "run", launcher=["prlimit", "--nofile=300:4000"]) as served:
        raised = psutil.Process(served.server_info.pid).rlimit(psutil.RLIMIT_NOFILE)

    message = "error: expected a limit of at least 256 open files, got 100; fix: ulimit -n 256"
    assert (low.returncode, low.stderr.splitlines()[-1]) == (1, message)
    assert raised == (4000, 4000)


@pytest.mark.slow
@pytest.mark.skipif(not os.access(PROCESSES, os.W_OK), reason="no control groups of version 1")
@pytest.mark.parametrize("limit", [30, 60, 150])
def test_lack_of_processes_ends_the_start(environment, limit):
    """Triton would wait forever for a thread that it did not get."""
    group = PROCESSES / f"nereid-{os.getpid()}"
    group.mkdir()
    (group / "pids.max").write_text(str(limit))
    enter = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', group / "cgroup.procs"]
    words = [NEREID, "serve", "--repository", REPOSITORY, *ANY_PORTS]
    try:
        done = captured([*enter, *words], env=environment, timeout=WATCHDOG_S)
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the end of all processes")
        group.rmdir()

    assert (done.returncode, done.stdout) == (1, "")
    assert "a higher limit" in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr


@cases(
    field=(
        "ensemble",
        "classify_v1/config.pbtxt",
        "max_batch_size",
        "max_batchsize",
        "model 'classify_v1'.*4:14.*no field named \"max_batchsize\"",
    ),
    parameter_fused=(
        "cpu",
        "imagenet_preprocess/config.pbtxt",
        'key: "preset"',
        'key: "presets"',
        "model 'classify_v1'.*unknown parameter 'presets'.*preset, resize",
    ),
)
def test_broken_repository_is_rejected_with_model_and_field(
    profile, relative, before, after, reason, environment, tmp_path
):
    copy = shutil.copytree(REPOSITORY, tmp_path / "repository")
    text = (copy / relative).read_text()
    assert before in text
    (copy / relative).write_text(text.replace(before, after))

    words = ["--repository", str(copy), "--profile", profile, "--strict", *ANY_PORTS]
    done = nereid("serve", *words, **environment)

    assert re.search(reason, done.stderr.splitlines()[-1]), done.stderr
    assert (done.returncode, done.stdout) == (1, "")


def test_port_of_another_server_is_never_ready(fused, tmp_path, environment):
    """A response on the port counts only if it is this server's own."""
    occupied_ports = replace(fused.options.ports, grpc=free_ports(1)[0])
    late = EmbeddedServer(replace(fused.options, ports=occupied_ports), tmp_path, environment)

    with pytest.raises(ServerError, match=r"http port .* cannot be used"):
        late.start()
    with pytest.raises(
        ServerError, match=r"not ready after 1 s, /v2/health/ready returned: this server does not listen"
    ):
        late.wait_ready(timeout_s=1)


def test_doctor_passes_on_this_machine():
    done = nereid("doctor", COLUMNS="200")

    assert (done.returncode, done.stderr) == (0, "")
    assert "2.51.0 (24.10) in nvidia-pytriton 0.7.0" in done.stdout


@pytest.mark.parametrize(
    "path", ["v2/repository/index", "v2/systemsharedmemory/status", "v2/trace/setting", "v2/logging"]
)
def test_administrative_apis_need_the_token(both_profiles, path):
    address = f"http://{url(both_profiles['ensemble'], 'http')}/{path}"
    method = "POST" if "repository" in path else "GET"

    refused = httpx.request(method, address)
    allowed = httpx.request(method, address, headers={"nereid-token": TOKEN})

    assert (refused.status_code, allowed.status_code) == (403, 200)
