"""The output of generators, and the messages about missing ones."""

import base64
import json
import subprocess
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loadtest import perf_analyzer, wrk
from nereid.tune.load_generator import Load

REPORT = (
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency\n"
    "32,167.75,15,1873,99856,402,84450,1646,1,177116,251970,263158,269116\n"
)
PRINTED = """Running 1s test @ http://127.0.0.1:1/v2/models/classify_v1/infer
  1 threads and 8 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency    41.07ms   12.07ms  96.63ms   80.51%
    Req/Sec   195.10     22.99   230.00     70.00%
  Latency Distribution
     50%  900.00us
     75%   44.41ms
     90%   57.63ms
     99%    1.20s
  195 requests in 1.00s, 0.97MB read
Requests/sec:    194.66
"""


def test_reports_are_read():
    assert perf_analyzer.parse(REPORT) == Load(167.75, 177.116, 251.97, 269.116)
    assert wrk.parse(PRINTED) == Load(194.66, 0.9, 57.63, 1200.0, answered=195)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (perf_analyzer.parse, "", "report is invalid"),
        (perf_analyzer.parse, REPORT.replace("p99 latency", "p98 latency"), "p99 latency"),
        (perf_analyzer.parse, REPORT.replace("167.75", "n/a"), "n/a"),
        (wrk.parse, PRINTED.replace("Requests/sec", "Requests"), "printed no rate"),
        (wrk.parse, PRINTED.replace("194.66", "0.00"), "no request was answered"),
        (wrk.parse, PRINTED + "  Non-2xx or 3xx responses: 195\n", "the rate is invalid"),
        (wrk.parse, PRINTED + "  Socket errors: connect 0, read 1\n", "the rate is invalid"),
    ],
)
def test_invalid_reports_end_the_measurement(parse, text, message):
    with pytest.raises(SystemExit, match=message):
        parse(text)


@pytest.fixture
def late():
    """Serve HTTP responses slower than wrk's timeout of two seconds; gives the port."""

    class Late(BaseHTTPRequestHandler):
        """Correct but slow responses."""

        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(2.2)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Late) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.skipif(not wrk.is_installed(), reason="needs wrk; fix: apt-get install wrk")
def test_slow_responses_are_not_failures(tmp_path, late):
    """A slow machine may have a p99 of more than two seconds."""
    photo = tmp_path / "photo.bytes"
    photo.write_bytes(b"photo")

    load = wrk.post(late, "/", photo, concurrency=1, seconds=3)

    assert load.p99_ms > 2000


def test_an_image_is_sent_with_its_length(tmp_path):
    perf_analyzer.write_input(tmp_path / "input.json", b"photo")

    (request,) = json.loads((tmp_path / "input.json").read_text())["data"]
    assert base64.b64decode(request["image"]["b64"]) == b"\x05\0\0\0photo"


def binary(folder: Path, lines: str) -> perf_analyzer.Analyzer:
    """Write a program in place of the binary."""
    folder.mkdir(parents=True)
    (folder / "perf_analyzer").write_text(f"#!/bin/sh\n{lines}\n")
    (folder / "perf_analyzer").chmod(0o755)
    return perf_analyzer.Analyzer(folder)


@pytest.mark.parametrize(
    ("library", "fix"),
    [
        ("libb64.so.0d", "apt-get install libb64-0d"),
        ("libx.so.1", "install the package that has libx.so.1"),
    ],
)
def test_missing_library_is_named(tmp_path, library, fix):
    message = (
        f"perf_analyzer: error while loading shared libraries: {library}: cannot open shared object file"
    )
    analyzer = binary(tmp_path / "cache" / "nereid" / "perf_analyzer-2.50.0", f"echo '{message}'; exit 127")

    assert analyzer.why_unusable() == f"perf_analyzer needs {library}; fix: {fix}"
    with pytest.raises(perf_analyzer.Unavailable, match=library):
        perf_analyzer.find({"XDG_CACHE_HOME": str(tmp_path / "cache")})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('echo "version GLIBC_2.34 not found"; exit 1', "does not run here: version GLIBC_2.34 not found"),
        ("#!/none\n", "cannot be started: "),
    ],
)
def test_binary_that_does_not_run_is_reported(tmp_path, lines, message):
    """The check comes before the measurement, since a failure in its last round would lose all rounds."""
    analyzer = binary(tmp_path / "tool", lines)
    if lines.startswith("#!"):
        (analyzer.folder / "perf_analyzer").write_text(lines)

    assert message in analyzer.why_unusable()


def test_failed_run_ends_the_measurement(tmp_path):
    analyzer = binary(tmp_path / "tool", "echo no such model; exit 99")
    target = perf_analyzer.Target("grpc", 1, "none", tmp_path / "input.json")

    with pytest.raises(SystemExit, match=r"exit status 99:\nno such model"):
        analyzer.load(target, 1, 1.0)


def test_windows_without_a_response_become_longer(tmp_path):
    """On a busy machine, a second may pass without a response."""
    analyzer = binary(
        tmp_path / "tool",
        f"""case "$*" in *"--measurement-interval 1000"*)
        echo No valid requests recorded. Please use a larger time window.; exit 3;; esac
        while [ "$1" != -f ]; do shift; done; printf '{REPORT}' > "$2" """,
    )
    target = perf_analyzer.Target("grpc", 1, "slow", tmp_path / "input.json")

    assert analyzer.load(target, 32, 1.0).rate == 167.75


def test_analyzer_is_downloaded_once_and_completely(tmp_path, monkeypatch):
    fetched: list[str] = []

    def download(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        requirement = command[-1]
        fetched.append(requirement)
        if requirement in failing:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no network\n")
        name = requirement.partition("==")[0].replace("-", "_")
        member = {"tritonclient": "bin/perf_analyzer"}.get(name, "lib/libcudart.so.12")
        with zipfile.ZipFile(Path(command[-2]) / f"{name}-1-py3.whl", "w") as wheel:
            wheel.writestr(f"data/{member}", "#!/bin/sh\necho Perf Analyzer\n")
        return subprocess.CompletedProcess(command, 0, "", "")

    run = subprocess.run
    monkeypatch.setattr(
        perf_analyzer.subprocess,
        "run",
        lambda command, **options: (download if "pip" in command else run)(command, **options),
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path)}

    failing = [each for each in perf_analyzer.WHEELS if "cuda" in each]
    with pytest.raises(perf_analyzer.Unavailable, match=r"could not be downloaded: ERROR: no network; fix: "):
        perf_analyzer.find(environment)
    assert list((tmp_path / "nereid").iterdir()) == []

    failing = []
    first = perf_analyzer.find(environment)
    assert perf_analyzer.find(environment) == first
    assert {path.name for path in first.folder.iterdir()} == {"perf_analyzer", "libcudart.so.12"}
    assert len(fetched) == 4
