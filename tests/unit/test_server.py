"""Before and around a start of the server: machine, flags, ports, run directories, checks and log."""

import hashlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from nereid.base.assets import REPOSITORY
from nereid.base.config.server_flags import backend_config_values, flag_values
from nereid.base.errors import ServerError
from nereid.server import installation, ports, preflight, run_dir
from nereid.server.command_line import ServerOptions, environment
from nereid.server.embedded_server import unservable_models
from nereid.server.ports import Ports, check_ports, free_ports
from nereid.server.run_dir import ServerInfo
from nereid.server.serve import announcement
from nereid.server.server_log import MAX_REPETITIONS, PERIOD_S, ServerLog
from tests.commands import captured
from tests.tables import cases, rows

OURS = "--backend-config=onnxruntime,a="
# The words after it are those of a server; its child is a stub.
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
CHILD = """
import json, sys
sys.path[:0] = {path!r}
from nereid.base.config.server_flags import server_command_line
print(json.dumps(server_command_line()))
"""


def test_stub_reads_the_words_its_parent_was_started_with():
    words = ["--backend-config", "", "onnxruntime,a=b c", "--id=naïve"]
    child = CHILD.format(path=sys.path)

    done = captured([sys.executable, "-c", PARENT, child, *words], check=True, timeout=60)

    assert json.loads(done.stdout) == [sys.executable, "-c", PARENT, child, *words]


@cases(
    without_a_value=(["tritonserver", "--flag"], []),
    empty_value=(["tritonserver", "--flag="], [""]),
    equals_sign_in_the_value=(["tritonserver", "--flag=a=b"], ["a=b"]),
    longer_names=(["tritonserver", "--flagged=1", "--no-flag=2"], []),
    joined_then_apart=(["tritonserver", "--flag=1", "--flag", "2", "x"], ["1", "2"]),
    apart_then_joined=(["tritonserver", "--flag", "1", "--flag=2"], ["1", "2"]),
)
def test_values_of_a_flag_keep_their_order(words, values):
    assert flag_values(words, "--flag") == values


@cases(
    last_wins=([OURS + "1", "--backend-config", "onnxruntime,a=2"], {"a": "2"}),
    other_backends=(["--backend-config=python,a=1", "--backend-config=onnxruntime2,a=2"], {}),
    value_with_every_separator=([OURS + "/x=y:/z,w"], {"a": "/x=y:/z,w"}),
    empty_value=([OURS], {"a": ""}),
    all_backends=(["--backend-config=a=1", "--backend-config", "b=2"], {"a": "1", "b": "2"}),
    own_setting_over_all_backends=([OURS + "1", "--backend-config=a=2"], {"a": "1"}),
    comma_in_the_value=(["--backend-config=a=/x,onnxruntime,a=2"], {"a": "/x,onnxruntime,a=2"}),
)
def test_settings_are_those_of_one_backend(words, settings):
    assert backend_config_values(["tritonserver", *words], "onnxruntime") == settings


@pytest.fixture
def base(tmp_path):
    return run_dir.root({"XDG_RUNTIME_DIR": str(tmp_path)})


def server_info(repository: object = "/r", **changes) -> ServerInfo:
    made = ServerInfo(1, "127.0.0.1", Ports(1, 2, 3), str(repository), "cpu", "secret", 4)
    return replace(made, **changes)


def test_newest_server_of_the_repository_is_found_and_the_others_named(base, repository, nereid):
    ports = Ports(*free_ports(3))
    with run_dir.occupy(base, repository) as one, run_dir.occupy(base, repository) as other:
        run_dir.write(one, server_info(repository, pid=1001, ports=ports, health_port=0))
        alone = nereid("versions", "classify")
        run_dir.write(other, server_info(repository, pid=1002, ports=ports, health_port=0))
        both = nereid("versions", "classify")
        assert run_dir.find(base, repository).pid == 1002

    assert "note:" not in alone.stderr
    note = (
        "note: this command uses the newest server of this repository, pid 1002; it does not reach pid 1001"
    )
    assert both.stderr.count(note) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_persons_get_addresses_and_a_request_to_try(host):
    assert announcement(ServerOptions(REPOSITORY, "cpu"), server_info(host=host)) == (
        "ready: http 127.0.0.1:1, grpc 127.0.0.1:2, metrics 127.0.0.1:3, health 127.0.0.1:4; "
        "try: nereid classify IMAGE; stop: Ctrl-C"
    )


def test_request_to_try_is_for_a_served_model_with_outputs(tmp_path):
    line = announcement(ServerOptions(REPOSITORY, "cpu"), server_info(), {"classify": "why", "dogs": "why"})
    assert "; not served: classify, dogs; try: nereid classify IMAGE --model classify_v1;" in line

    is_ready = "curl -i http://127.0.0.1:1/v2/health/ready;"
    assert is_ready in announcement(ServerOptions(tmp_path), server_info())
    (tmp_path / "m" / "1").mkdir(parents=True)
    text = 'backend: "onnxruntime" input { name: "image" data_type: TYPE_STRING dims: [ 1 ] }'
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    assert is_ready in announcement(ServerOptions(tmp_path), server_info())


@rows(
    ("3.13", "Python 3.11 or 3.12, found 3.13; fix: install one"),
    ("3.12", "libpython3.12.so.1.0; fix: apt-get install libpython3.12"),
    ("3.11", "libpython3.11.so.1.0; fix: apt-get install libpython3.11"),
)
def test_preflight_says_what_to_install(python, message, tmp_path):
    problems = [f"{part}; fix: {fix}" for part, fix in preflight.missing(python, (tmp_path,))]

    assert any(problem.startswith(message) for problem in problems)


def test_free_ports_are_not_those_of_outgoing_connections(tmp_path, monkeypatch):
    """Outgoing connections could take such a port first; they are used only if no other is free."""
    range_file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "OUTGOING_PORTS", range_file)
    range_file.write_text("12000\t60999\n")
    below = free_ports(3)
    range_file.write_text("1024\t65535\n")

    assert all(10_000 <= port < 12_000 for port in below)
    assert len(set(below)) == len(set(free_ports(3))) == 3


def test_found_port_is_for_its_finder_only(tmp_path, monkeypatch):
    """No other process finds it, or can take it by chance; a server of ours listens on it, more than once."""
    range_file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "OUTGOING_PORTS", range_file)
    range_file.write_text("32768\t60999\n")
    (port,) = free_ports(1)
    range_file.write_text(f"{port + 1}\t{port + 1}\n")
    monkeypatch.setattr(ports, "MIN_PORT", port)

    others = free_ports(1)

    assert others != [port]
    with socket.socket() as by_chance, pytest.raises(OSError, match="in use"):
        by_chance.bind(("127.0.0.1", port))
    message = f"http port {port} on 127.0.0.1 cannot be used: .*in use.*--http-port"
    for _ in range(2):
        check_ports("127.0.0.1", Ports(port, port, port))
        with socket.create_server(("127.0.0.1", port)), pytest.raises(ServerError, match=message):
            check_ports("127.0.0.1", Ports(port, port, port))


def test_later_connections_get_a_wide_receive_buffer():
    """The next connection has as much as the kernel allows; a port without a listener changes nothing."""
    largest = int(Path("/proc/sys/net/core/rmem_max").read_text())
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def accepted_bytes() -> int:
            with socket.create_connection(address), server.accept()[0] as connection:
                return connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

        before = accepted_bytes()
        assert ports.widen_receive_buffers(os.getpid(), address[1])
        assert accepted_bytes() == 2 * min(ports.RECEIVE_BYTES, largest) != before
    assert not ports.widen_receive_buffers(os.getpid(), address[1])


def test_server_is_found_by_its_repository_and_its_token_is_private(base, tmp_path):
    ours, other = tmp_path / "ours", tmp_path / "other"
    written = server_info(ours)
    assert run_dir.find(base, ours) is None
    assert not base.exists()

    with run_dir.occupy(base, ours) as folder:
        run_dir.write(folder, written)
        assert (run_dir.find(base, ours), run_dir.find(base, other)) == (written, None)
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (base, folder, folder / "server.json")]

    assert (run_dir.find(base, ours), folder.exists()) == (None, False)
    assert written.url("grpc") == "127.0.0.1:2"
    assert modes == [0o700, 0o700, 0o600]


@cases("content", empty=b"", list=b"[]", no_text=b"\xff\xfe", fields=b"{}")
def test_damaged_record_is_named(base, tmp_path, content):
    with run_dir.occupy(base, tmp_path) as folder:
        for find, name in ((run_dir.find, "server"), (run_dir.find_gateways, "gateway")):
            (folder / f"{name}.json").write_bytes(content)
            text = rf"'{folder}/{name}\.json' is damaged: expected .*, got: .*; fix: restart the process"
            with pytest.raises(ServerError, match=text):
                find(base, tmp_path)


def test_server_without_a_supervisor_is_an_orphan(base, tmp_path):
    with run_dir.occupy(base, tmp_path) as folder:
        left = folder.with_name("left")
        left.mkdir()
        server, other = (subprocess.Popen(["sleep", "60"], cwd=directory) for directory in (left, folder))
        try:
            run_dir.write(folder, server_info(tmp_path, pid=other.pid))
            run_dir.write(left, server_info(tmp_path, pid=server.pid))
            assert run_dir.orphans(base, tmp_path) == [(server.pid, left)]
            run_dir.write(left, server_info(tmp_path, pid=other.pid))
            assert run_dir.orphans(base, tmp_path) == []
        finally:
            for process in (server, other):
                process.kill()
                process.wait()
        run_dir.write(left, server_info(tmp_path, pid=server.pid))
        assert run_dir.orphans(base, tmp_path) == []


def test_directory_of_a_killed_server_is_neither_found_nor_kept(base, tmp_path):
    """One may vanish while the next one is made, because a process that ends removes its own."""
    with run_dir.occupy(base, tmp_path) as folder:
        run_dir.write(folder, server_info(tmp_path))
        left_over = shutil.copytree(folder, folder.with_name("left-over"))
        folder.with_name("vanished").symlink_to("nothing")

    assert run_dir.find(base, tmp_path) is None
    with run_dir.occupy(base, tmp_path) as other:
        assert (left_over.exists(), other.is_dir()) == (False, True)


def test_unusable_runtime_folder_is_not_used(tmp_path):
    """An XDG_RUNTIME_DIR that does not exist, as under sudo or cron, is replaced by the temporary folder."""
    expected = Path(tempfile.gettempdir()) / f"nereid-{os.getuid()}"

    assert run_dir.root({"XDG_RUNTIME_DIR": str(tmp_path / "nowhere")}) == run_dir.root({}) == expected


def test_folder_open_to_others_is_rejected(base, tmp_path):
    with run_dir.occupy(base, tmp_path) as folder:
        run_dir.write(folder, server_info(tmp_path))
        base.chmod(0o755)
        assert run_dir.find(base, tmp_path) is None

    message = r"must be a directory of user .* with mode 0700; fix: remove it"
    with pytest.raises(ServerError, match=message), run_dir.occupy(base, tmp_path):
        pass


def test_backends_of_an_installed_triton_come_first(tmp_path):
    root = tmp_path / "tritonserver"
    for name in (
        "bin/tritonserver",
        f"backends/python/{installation.STUB}",
        f"backends/python/{installation.LIBRARY}",
        "backends/onnxruntime/libtriton_onnxruntime.so",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)

    installed = installation.find_installation({installation.FOLDER: str(root)})
    backends = installation.assemble_backends(installed, tmp_path / "backends")

    assert (backends / "python" / installation.STUB).read_text() == f"backends/python/{installation.STUB}"
    assert [path.name for path in (backends / "onnxruntime").iterdir()] == ["libtriton_onnxruntime.so"]
    ours = {path.parent.name for path in backends.glob("*/model.py")}
    assert ours == {"preprocess", "text_reader", "fused", "ab_router", "boxes"}


def test_missing_part_of_an_installed_triton_is_named(tmp_path):
    message = f"^{installation.FOLDER} is '{tmp_path}', which has no bin/tritonserver$"
    with pytest.raises(ServerError, match=message):
        installation.find_installation({installation.FOLDER: str(tmp_path)})


def test_cuda_libraries_of_pip_are_searched_last(tmp_path, monkeypatch):
    """CuPy and ONNX Runtime do not find them alone; a CUDA of the machine comes first."""
    folder = tmp_path / "nvidia" / "cuda_nvrtc" / "lib"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)

    variables = environment(installation.find_installation({}), {"LD_LIBRARY_PATH": "/opt/cuda"})
    words = variables["LD_LIBRARY_PATH"].split(":")

    assert folder in installation.cuda_folders()
    assert words.index("/opt/cuda") < words.index(str(folder))


NETWORK = "efficientnet_lite0"


@pytest.fixture
def repository(tmp_path):
    ignored = shutil.ignore_patterns("*.onnx", ".*.nereid")
    models = shutil.copytree(REPOSITORY, tmp_path / "models", ignore=ignored)
    for number in "12":
        folder = models / NETWORK / number
        (folder / "model.onnx").write_text(number)
        digest = hashlib.sha256(number.encode()).hexdigest()
        (folder / "SHA256SUMS").write_text(f"{digest}  model.onnx\n")
    return models


def reasons(repository, profile: str) -> dict[str, str]:
    return unservable_models(ServerOptions(repository, profile))


def test_unchanged_versions_are_served(repository):
    (repository / NETWORK / "1" / "notes.txt").write_text("mine")
    (repository / NETWORK / "2" / "SHA256SUMS").unlink()
    (repository / NETWORK / "2" / "model.onnx").write_text("changed")

    assert reasons(repository, "cpu") == reasons(repository, "ensemble") == {}


@pytest.mark.parametrize("profile", ["cpu", "ensemble"])
@cases(
    missing=(1, Path.unlink, "'model.onnx' is missing"),
    changed=(1, lambda path: path.write_text("3"), "'model.onnx' has changed"),
    unreadable=(2, lambda path: (path.unlink(), path.symlink_to("nowhere")), "'{}' cannot be read"),
)
def test_models_that_run_a_damaged_version_are_not_served(number, damage, problem, profile, repository):
    path = repository / NETWORK / str(number) / "model.onnx"
    damage(path)

    refusals = reasons(repository, profile)

    name, other = f"classify_v{number}", f"classify_v{3 - number}"
    damaged = f"version {number} of '{NETWORK}' is damaged: {problem.format(path)}"
    assert damaged in refusals[name]
    assert refusals[name].endswith("; fix: restore the file, or publish it as a new version")
    assert {*refusals} == {name} | ({other, NETWORK} if profile == "ensemble" else set())
    if profile == "ensemble":  # the network with both versions is one model of Triton
        assert refusals[other] == f"model '{other}': its step '{NETWORK}' is not served"
        assert damaged in refusals[NETWORK]


def test_invalid_bounds_of_instances_are_not_served(repository):
    path = repository / NETWORK / "config.pbtxt"
    text = path.read_text()
    bounds = 'parameters { key: "nereid.instances" value { string_value: "BOUNDS" } }\n'

    path.write_text(text + bounds.replace("BOUNDS", "1-4"))
    assert reasons(repository, "ensemble") == {}
    path.write_text(text + bounds.replace("BOUNDS", "many"))
    reason = reasons(repository, "ensemble")[NETWORK]
    assert reason.startswith(f"model '{NETWORK}': parameter 'nereid.instances': expected LOW-HIGH with 1 <= ")
    assert reason.endswith("got 'many'")


def test_ensemble_of_an_ensemble_is_left_out_too(repository):
    """Triton would load the damaged version with either of them."""
    shutil.copytree(repository / "classify_v2", outer := repository / "outer")
    text = (outer / "config.pbtxt").read_text().replace("classify_v2", "outer")
    (outer / "config.pbtxt").write_text(text.replace(NETWORK, "classify_v2"))
    (repository / NETWORK / "1" / "model.onnx").unlink()

    refusals = reasons(repository, "ensemble")

    assert {*refusals} == {NETWORK, "classify_v1", "classify_v2", "outer"}
    assert refusals["outer"] == "model 'outer': its step 'classify_v2' is not served"


NOISE = [
    'W1121 10:00:00.1 1 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"',
    'E1121 10:00:00.1 1 server.cc:241] "CudaDriverHelper has not been initialized."',
    "Error: Failed to initialize NVML",
    'W1121 10:00:00.1 1 metrics.cc:798] "DCGM unable to start: DCGM initialization error"',
]
LOADING = 'I1121 10:00:00.1 1 model_lifecycle.cc:472] "loading: classify:1"'
NO_FILE = (
    "E1121 10:00:00.1 1 model_lifecycle.cc:642] \"failed to load 'net' version 1: Internal: InvalidConfig: "
    "unable to find '/r/net/1/model.onnx' for model instance 'net'\\n\\nAt:\\n  session.py(47)\\n\""
)
PARSE = (
    "[libprotobuf ERROR text_format.cc:337] Error parsing text-format inference.ModelConfig: 4:14: "
    'Message type "inference.ModelConfig" has no field named "max_batchsize".'
)
POLL = (
    "E1121 10:00:00.1 1 model_repository_manager.cc:1460] \"Poll failed for model directory 'e': "
    'failed to read text proto from /r/e/config.pbtxt"'
)
END = "error: creating server: Internal - failed to load all models"


def read(*lines: str) -> tuple[ServerLog, list[str]]:
    shown: list[str] = []
    log = ServerLog(shown.append)
    for line in lines:
        log.add(line)
    return log, shown


def test_cuda_noise_is_folded_into_one_line():
    _, shown = read(NOISE[0], LOADING, *NOISE[1:])

    note = "no GPU: serving on the CPU (Triton's CUDA, NVML and DCGM warnings are left out)"
    assert shown == [note, LOADING]


@cases(
    field_of_a_broken_config=(
        [PARSE, POLL, END],
        "model 'e': failed to read text proto from /r/e/config.pbtxt "
        '(4:14: Message type "inference.ModelConfig" has no field named "max_batchsize".)',
    ),
    tritons_error_without_a_failed_model=(
        [LOADING, 'E1121 10:00:00.1 1 main.cc:1] "failed to start HTTP service: Unavailable"', END],
        "failed to start HTTP service: Unavailable; creating server: Internal - failed to load all models",
    ),
)
def test_reason_of_a_failed_start_is_named(lines, reason):
    assert str(read(*lines)[0].failure()) == reason


def test_refused_load_names_the_model_and_its_reason():
    """Recorded from Triton 24.10."""
    log, _ = read(LOADING)
    why = "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: RuntimeError: no weights"
    body = json.dumps({"error": f"{why}\n\nAt:\n  /r/m/1/model.py(3): initialize\n;\n"})

    assert str(log.refused_load("m", body)) == "model 'm': RuntimeError: no weights"
    assert log.failures.keys() == {"m"}


def test_each_failure_is_logged_once():
    """Triton repeats a failed load at four places; a later attempt is logged again."""
    reason = "unable to find '/r/net/1/model.onnx' for model instance 'net'"
    stub = (
        f'I1121 10:00:00.1 1 pb_stub.cc:366] "Failed to initialize Python stub: InvalidConfig: {reason}\\n"'
    )
    instance = f'E1121 10:00:00.1 1 backend_model.cc:692] "ERROR: Failed to create instance: {reason}\\n"'
    table = ["| net | 1 | READY |", f"| net | 2 | UNAVAILABLE: Internal: {reason} |", "|     |   | At: |"]
    final = [f"error: creating server: load failed: {reason}", "At:", "  session.py(47)", ";"]

    log, shown = read(stub, instance, NO_FILE, *table, *final, LOADING, NO_FILE)

    assert shown == [NO_FILE, table[0], LOADING, NO_FILE]
    assert str(log.failure()) == f"model 'net': {reason}"


def test_failure_without_a_reason_hides_no_other_line():
    empty = "E1121 10:00:00.1 1 model.cc:1] failed to load 'net' version 1: Internal: "
    line = 'W1121 10:00:00.1 1 memory.cc:30] "something else"'

    assert read(LOADING, empty, line)[1][-1] == line


def test_last_error_has_the_reasons_of_models_that_were_never_loaded():
    last = [
        "error: creating server: Invalid argument - load failed for model 'e': ensemble 'e' depends on 'net' "
        "which has no loaded version. Model 'net' loading failed with error: version 1 is at UNAVAILABLE "
        "state: Internal: oops;",
        "load failed for model 'old': at least one version must be available under the version policy of "
        "model 'old'",
        "load failed for model 'net': version 1 is at UNAVAILABLE state: Internal: oops;",
    ]

    log, shown = read(LOADING, *last)

    assert shown == [LOADING]
    assert log.failures == {
        "e": "model 'e': ensemble 'e' depends on 'net' which has no loaded version.",
        "old": "model 'old': at least one version must be available under the version policy of model 'old'",
        "net": "model 'net': oops",
    }


@cases(
    crash=("Signal (6) received.", 6),
    end=("Signal (15) received.", 15),
    endless=(f"Signal ({'9' * 5000}) received.", 0),
    words_of_a_model=("W1121 10:00:00.1 1 tensors.py:9] Signal (6) received.", 0),
)
def test_signal_of_the_server_is_known(line, expected):
    assert read(LOADING, line, LOADING)[0].signal == expected


def test_silent_end_has_the_last_lines():
    log, _ = read(LOADING)

    assert str(log.failure()) == "tritonserver ended without an error message"
    assert log.failure().__notes__ == [LOADING]


def test_message_that_repeats_is_counted():
    """A server without free descriptors writes 100,000 lines per second; other lines still appear."""
    now = 0.0
    shown: list[str] = []
    log = ServerLog(shown.append, lambda: now)
    line = "[warn] Error from accept() call: Too many open files"

    for number in range(1000):
        log.add(line)
        log.add(f"I1121 10:00:00.{number} 1 server.cc:1] same message, other time")
    log.add(LOADING)
    now = PERIOD_S
    log.add(LOADING)

    assert shown.count(line) == MAX_REPETITIONS
    assert len(shown) == 2 * MAX_REPETITIONS + 4
    assert shown[-4:] == [
        LOADING,
        "980 more lines were left out: Error from accept() call: Too many open files",
        "980 more lines were left out: same message, other time",
        LOADING,
    ]


def test_reported_devices_are_taken_once():
    """Only a line that begins with the report counts, since other lines may contain text of a client."""
    report = "\"device failed: process 41 of 'net' version 1 must be replaced: CUDA failure 700\""
    forged = LOADING.replace("classify:1", "device failed: process 42 of 'net'")
    log, _ = read(f"E1121 10:00:00.1 1 tensors.py:94] {report}", forged)

    assert [log.take_failed_devices() for _ in range(2)] == [{41}, set()]
