"""docker-compose.yml and the images: valid, pinned, hardened, with the flags of `nereid serve`."""

import fnmatch
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nereid.gateway.http import serving
from nereid.server.command_line import KEEP_BUFFERS, ServerOptions, command
from nereid.server.embedded_server import STOP_TIMEOUT_S
from nereid.server.wheel import Wheel
from tests.conftest import ROOT
from tests.deployment import (
    COMPOSE,
    DOCUMENT,
    ENV_EXAMPLE,
    NVIDIAS,
    SERVICES,
    SLIM,
    TOKEN,
    command_line,
    copies,
    instructions,
)

DOCKERFILES = (NVIDIAS, SLIM)
PROFILES = ("cpu", "gpu", "load", "scale")
# NVIDIA's Triton by service, with the profile of this project that it serves.
SERVERS = {"triton-cpu": "cpu", "triton-gpu": "gpu"}
SLIM_SERVERS = ("server-a", "server-b")
PROXY_CONFIG = ROOT / "deploy" / "proxy" / "haproxy.cfg"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
WATCHDOG_S = 120

# Differences of the servers from `nereid serve --host 0.0.0.0`, each with its reason.
LEFT_OUT = {
    "--backend-config=python,shm-region-prefix-name=nereid-": "a container's shared memory ends with it",
    "--model-control-mode=explicit": "no command finds a server in a container, so none could load",
    "--load-model=*": "all are loaded in the mode `none`",
}
ADDED = {
    "--model-control-mode=none": "the repository is mounted read-only, and what cannot load runs no code",
    "--exit-timeout-secs=30": "Triton's default, explicit because Compose must wait longer",
    "--trace-config=mode=opentelemetry": "traces go to Jaeger",
    "--trace-config=opentelemetry,url=http://jaeger:4318/v1/traces": "traces go to Jaeger",
    "--trace-config=opentelemetry,resource=service.name=triton": "traces go to Jaeger",
    "--trace-config=level=TIMESTAMPS": "traces go to Jaeger",
    "--trace-config=rate=100": "traces go to Jaeger",
}


def seconds(duration: str) -> float:
    """Read a duration of Compose's, in seconds."""
    assert duration.endswith("s")
    return float(duration.removesuffix("s"))


def check_schema(path: Path) -> int:
    """Check a compose file against the published schema; returns the exit code."""
    program = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(program, capture_output=True, timeout=WATCHDOG_S).returncode


def test_compose_file_follows_its_schema(tmp_path):
    """The published schema accepts the file, and rejects a misspelt key."""
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(COMPOSE.read_text().replace("stop_grace_period", "stop_grace"))

    assert (check_schema(COMPOSE), check_schema(wrong) != 0) == (0, True)


@pytest.mark.skipif(
    not shutil.which("docker-compose"), reason="needs docker-compose; fix: apt-get install docker-compose"
)
def test_compose_reads_the_file(tmp_path):
    """Compose accepts the file with all profiles, and only with a token."""
    profiles = [word for name in PROFILES for word in ("--profile", name)]
    (nothing_set := tmp_path / "env").touch()

    def config(token: str) -> subprocess.CompletedProcess:
        environment = {name: value for name, value in os.environ.items() if name != "NEREID_TOKEN"}
        return subprocess.run(
            ["docker-compose", "--env-file", str(nothing_set), *profiles, "config", "--services"],
            cwd=ROOT,
            env=environment | ({"NEREID_TOKEN": token} if token else {}),
            capture_output=True,
            text=True,
            timeout=WATCHDOG_S,
        )

    taken, refused = config(TOKEN), config("")

    assert (taken.returncode, sorted(taken.stdout.split())) == (0, sorted(SERVICES)), taken.stderr
    assert refused.returncode != 0
    assert "NEREID_TOKEN" in refused.stderr


def test_services_have_their_profiles():
    """Services start only with their profile."""
    profiles = {name: each["profiles"] for name, each in SERVICES.items() if "profiles" in each}

    assert profiles == {
        "triton-cpu": ["cpu"],
        "triton-gpu": ["gpu"],
        "gateway": ["cpu", "gpu"],
        "locust": ["load"],
        "server-a": ["scale"],
        "server-b": ["scale"],
        "proxy": ["scale"],
    }
    assert {name for each in profiles.values() for name in each} == {*PROFILES}


def test_every_image_is_pinned():
    """Each has a tag with a number in it; ours have this project's version."""
    tags = {name: each["image"].rpartition(":")[2] for name, each in SERVICES.items()}
    for dockerfile in DOCKERFILES:
        defaults = dict(each.split("=", 1) for each in instructions(dockerfile, "ARG"))
        for base in instructions(dockerfile, "FROM"):
            image = re.sub(r"\$\{(\w+)\}", lambda found, known=defaults: known[found[1]], base.split()[0])
            tags[f"{dockerfile}: {base}"] = image.rpartition(":")[2]

    assert {name: tag for name, tag in tags.items() if not re.search(r"\d+\.\d+", tag)} == {}
    built = {name: tags[name] for name, each in SERVICES.items() if "build" in each}
    assert {name: tag for name, tag in built.items() if not f"{tag}-".startswith(f"{VERSION}-")} == {}
    assert len(set(built.values())) == 3, "two of Triton, and the rest"


@pytest.mark.parametrize(("service", "profile"), SERVERS.items())
def test_servers_have_the_flags_of_nereid_serve(service, profile):
    """Every flag is the same, except for the listed differences."""
    options = ServerOptions(Path("/models"), profile, "0.0.0.0", token=TOKEN)
    program = Path("tritonserver")
    ours = command(
        options, Wheel(program, program, program, program), Path("/opt/tritonserver/backends"), "nereid"
    )

    entrypoint, *theirs = command_line(service)

    assert entrypoint == "/opt/nvidia/nvidia_entrypoint.sh"
    assert theirs[0] == ours[0]
    assert {*ours} - {*theirs} == {*LEFT_OUT}
    assert {*theirs} - {*ours} == {*ADDED}
    assert len(theirs) == len({*theirs})


@pytest.mark.parametrize("service", SERVERS)
def test_servers_have_the_environment_of_nereid_serve(service):
    """The same thresholds of malloc, and no telemetry."""
    wanted = {**KEEP_BUFFERS, "ORT_DISABLE_TELEMETRY": "1"}

    assert SERVICES[service]["environment"].items() >= wanted.items()
    in_image = dict(each.split("=", 1) for line in instructions(NVIDIAS, "ENV") for each in line.split())
    assert in_image.items() >= wanted.items()


@pytest.mark.parametrize("service", SERVERS)
def test_no_server_brings_another_triton(service):
    """The extras bring no second Triton or ONNX Runtime backend."""
    extras = SERVICES[service]["build"]["args"]["EXTRAS"]

    assert extras == {"triton-cpu": "cpu", "triton-gpu": "gpu13"}[service]


def test_only_gateway_and_proxy_are_published_beyond_loopback():
    """All other ports are on 127.0.0.1, and a server has none."""
    beyond = {
        name
        for name, each in SERVICES.items()
        if any(not port.startswith("127.0.0.1:") for port in each.get("ports", ()))
    }

    assert beyond == {"gateway", "proxy"}
    assert [name for name in (*SERVERS, *SLIM_SERVERS) if "ports" in SERVICES[name]] == []


def test_servers_cannot_reach_anything_outside():
    """Servers are on the internal network only."""
    assert DOCUMENT["networks"]["inside"] == {"internal": True}
    for service in (*SERVERS, *SLIM_SERVERS):
        assert [*SERVICES[service]["networks"]] == ["inside"]
    assert [name for name, each in SERVICES.items() if "network_mode" in each or "ipc" in each] == []


def test_triton_is_a_server_or_the_proxy():
    """Gateway and Locust send requests to `triton`, which is a server or the proxy."""
    named = {
        name
        for name, each in SERVICES.items()
        if isinstance(each["networks"], dict) and each["networks"]["inside"].get("aliases") == ["triton"]
    }

    assert named == {*SERVERS, "proxy"}
    assert "--url=triton:8001" in SERVICES["gateway"]["command"]
    assert {"--host=http://triton:8000", "--grpc=triton:8001"} <= {*SERVICES["locust"]["command"]}


def test_proxy_has_the_addresses_of_the_servers():
    """Compose sets only variables that the proxy's configuration reads; both servers are the same."""
    told = SERVICES["proxy"]["environment"]

    assert {*told} <= {*re.findall(r"^\s*presetenv (\w+)", PROXY_CONFIG.read_text(), re.M)}
    assert {each.rpartition(":")[0] for each in told.values()} - {"", "0.0.0.0"} == {*SLIM_SERVERS}
    assert SERVICES["server-a"] == SERVICES["server-b"]


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_is_hardened(service):
    """Each service has no root, no capabilities, a read-only file system, bounded logs and time to stop."""
    about = SERVICES[service]

    assert about["user"].split(":")[0] not in ("0", "root")
    assert (about["read_only"], about["cap_drop"]) == (True, ["ALL"])
    assert about["security_opt"] == ["no-new-privileges:true"]
    assert about["logging"]["options"] == {"max-size": "10m", "max-file": "3"}
    assert "stop_grace_period" in about
    assert "privileged" not in about
    assert "cap_add" not in about
    for volume in about.get("volumes", ()):
        if isinstance(volume, str):
            source, _, mode = volume.split(":") if volume.count(":") == 2 else (*volume.split(":"), "")
            assert mode == "ro" or source in DOCUMENT["volumes"], volume
        else:
            assert volume["read_only"], volume


def test_requests_have_time_to_end():
    """Compose waits longer for a service to stop than the service waits for its requests."""
    for service in SERVERS:
        (exit_s,) = re.findall(r"--exit-timeout-secs=(\d+)", " ".join(command_line(service)))
        assert seconds(SERVICES[service]["stop_grace_period"]) > int(exit_s)
    assert seconds(SERVICES["gateway"]["stop_grace_period"]) > serving.STOP_S
    (drain_s,) = re.findall(r"--drain-s=(\d+)", " ".join(SERVICES["server-a"]["command"]))
    assert seconds(SERVICES["server-a"]["stop_grace_period"]) > int(drain_s) + STOP_TIMEOUT_S
    (hard_stop,) = re.findall(r"^\s*hard-stop-after (\w+)", PROXY_CONFIG.read_text(), re.M)
    assert seconds(SERVICES["proxy"]["stop_grace_period"]) > seconds(hard_stop)
    (run_s,) = re.findall(r"docker stop --time (\d+)", (ROOT / SLIM).read_text())
    assert int(run_s) > int(drain_s) + STOP_TIMEOUT_S


def test_servers_of_the_slim_image_run_its_command():
    """Compose adds the repository and the profile."""
    (command,) = instructions(SLIM, "CMD")

    assert command_line("server-a") == [*json.loads(command), "--repository=/models", "--profile=cpu"]


def test_health_of_a_server_is_a_correct_response():
    """Each server classifies a photo, the slim one by its supervisor; all other services have checks."""
    program = ["python3", "/workspace/deploy/healthcheck.py"]
    of_supervisor = [*program, "--page", "http://127.0.0.1:8003/readyz"]
    for service in SERVERS:
        assert SERVICES[service]["healthcheck"]["test"] == ["CMD", *program]
    for service in SLIM_SERVERS:
        assert SERVICES[service]["healthcheck"]["test"] == ["CMD", *of_supervisor]
    assert json.dumps(of_supervisor) in instructions(SLIM, "HEALTHCHECK")[0]
    for dockerfile in DOCKERFILES:
        checks = instructions(dockerfile, "HEALTHCHECK")
        assert ["/workspace/deploy/healthcheck.py" in each for each in checks] == [True]
    assert [name for name, each in SERVICES.items() if each["healthcheck"]["test"][0] != "CMD"] == []


def test_gateway_is_not_unhealthy_before_a_server_can_be_ready():
    """`docker compose up --wait` fails at the first unhealthy service, so the gateway waits for servers."""
    patience = {name: seconds(SERVICES[name]["healthcheck"]["start_period"]) for name in SERVICES}

    assert patience["gateway"] >= max(patience[name] for name in (*SERVERS, *SLIM_SERVERS))


def test_mounted_files_exist():
    """Every mounted file is in the checkout, except the user's keys."""
    sources = [
        volume.split(":")[0] if isinstance(volume, str) else volume["source"]
        for each in SERVICES.values()
        for volume in each.get("volumes", ())
    ]
    ours = [source for source in sources if source.startswith("./") and not source.startswith("./keys")]

    assert ours
    assert [source for source in ours if not (ROOT / source).exists()] == []


def is_ignored(path: str) -> bool:
    """Return whether .dockerignore excludes a path from the build; the last matching line decides."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    names = [path, *(str(parent) for parent in Path(path).parents)][: len(Path(path).parts)]
    verdict = False
    for line in lines:
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            if any(fnmatch.fnmatch(name, pattern) for name in names):
                verdict = not line.startswith("!")
    return verdict


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_what_is_copied_exists(dockerfile):
    """Every source of a COPY is in the checkout, and .dockerignore lets it through."""
    sources = [source for source, _ in copies(dockerfile)]

    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [source for source in sources if is_ignored(source)] == []


def test_nothing_else_gets_into_an_image():
    """The build context has no secrets, no history, and only files that a Dockerfile copies."""
    everything = {source for dockerfile in DOCKERFILES for source, _ in copies(dockerfile)}
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M)

    assert {*allowed} - {"deploy"} == everything
    for path in (".env", "keys/keys.json", ".git/config", ".venv/bin/python", "tests/conftest.py"):
        assert is_ignored(path), path
    for path in (
        "deploy/kubernetes/base/kustomization.yaml",
        "nereid/__pycache__",
        "model_repository/.x.nereid",
    ):
        assert is_ignored(path), path


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_images_are_installed_by_the_tested_script_and_run_without_root(dockerfile):
    """deploy/install.sh installs everything; the last user is not root."""
    runs = instructions(dockerfile, "RUN")

    assert len([run for run in runs if "deploy/install.sh " in run]) == 1
    assert [run for run in runs if re.search(r"\b(pip|apt-get|curl|wget)\b", run.replace("PIP_", ""))] == []
    assert instructions(dockerfile, "USER")[-1] == "1000:1000"


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_dockerfiles_pass_their_linter(dockerfile):
    """Hadolint reports nothing."""
    program = str(Path(sys.executable).with_name("hadolint"))

    done = subprocess.run([program, dockerfile], cwd=ROOT, capture_output=True, text=True, timeout=WATCHDOG_S)

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        ([], 2, "usage:"),
        (["elsewhere", "/nonexistent", "cpu"], 2, "expected venv or system, got 'elsewhere'"),
        (["system", "/nonexistent", "cpu"], 1, "'/nonexistent' has no backend 'python'"),
        (["system", "{backends}", "cpu,embedded"], 2, "'embedded' installs a second Triton"),
    ],
    ids=["nothing", "place", "backends", "embedded"],
)
def test_install_script_says_what_is_wrong(arguments, code, reason, tmp_path):
    """A wrong call installs nothing and says why."""
    (tmp_path / "python").mkdir()
    arguments = [each.format(backends=tmp_path) for each in arguments]

    done = subprocess.run(
        [str(ROOT / "deploy/install.sh"), *arguments], capture_output=True, text=True, timeout=WATCHDOG_S
    )

    assert (done.returncode, done.stderr.startswith(reason)) == (code, True), done.stderr


def installed(name: str, extras: frozenset[str], found: set[tuple[str, frozenset[str]]]) -> set[str]:
    """Return the distributions that come along with one; `found` holds those that were looked at."""
    if (name, extras) not in found:
        found.add((name, extras))
        for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
            marker = requirement.marker
            if not marker or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                installed(canonicalize_name(requirement.name), frozenset(requirement.extras), found)
    return {name for name, _ in found}


@pytest.mark.parametrize(
    ("service", "module"), [("gateway", "nereid.cli.gateway"), ("locust", "loadtest.locustfile")]
)
def test_images_have_what_their_service_imports(service, module):
    """It is imported where only the distributions of the image's extras can be."""
    extras = SERVICES[service]["build"]["args"]["EXTRAS"].split(",")
    there = installed("nereid-serving", frozenset(extras), set())
    absent = {
        top
        for top, names in importlib.metadata.packages_distributions().items()
        if not {canonicalize_name(name) for name in names} & there
    }
    program = f"""
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
importlib.import_module({module!r})
"""

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=WATCHDOG_S
    )

    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("service", SLIM_SERVERS)
def test_servers_of_the_slim_image_may_run_what_they_write(service):
    """The stub is in the run directory, and Docker's tmpfs runs programs only with `exec`."""
    (tmp,) = SERVICES[service]["tmpfs"]

    assert "exec" in tmp.removeprefix("/tmp:").split(",")


def test_every_variable_is_explained():
    """.env.example has what docker-compose.yml reads, no other, each with a comment and the same default."""
    read = {
        name: default
        for name, _, default in re.findall(r"\$\{([A-Z_]+):([-?])([^}]*)\}", COMPOSE.read_text())
        if not default.startswith("set it")
    }
    explained = {}
    for block in ENV_EXAMPLE.read_text().strip().split("\n\n"):
        comment = [line for line in block.splitlines() if line.startswith("#")]
        for line in block.splitlines()[len(comment) :]:
            assert comment, f"{line} is not explained"
            name, _, value = line.partition("=")
            explained[name] = value

    # Compose itself reads the first; the second has no default.
    assert explained == {"COMPOSE_PROFILES": "cpu", "NEREID_TOKEN": "", **read}
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/.env", "/keys/"} <= {*ignored}
