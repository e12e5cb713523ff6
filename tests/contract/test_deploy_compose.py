"""docker-compose.yml and the images: valid, pinned, hardened, with the flags of `nereid serve`."""

import fnmatch
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nereid.gateway.settings import GatewaySettings
from nereid.gateway.v2.grpc_server import MAX_FRAME_BYTES
from nereid.server.command_line import KEEP_BUFFERS
from nereid.server.embedded_server import STOP_TIMEOUT_S
from tests import deployment
from tests.commands import captured
from tests.conftest import ROOT
from tests.deployment import COMPOSE, DOCUMENT, NVIDIAS, SERVICES, SLIM, command_line, instructions
from tests.tables import cases

DOCKERFILES = (NVIDIAS, SLIM)
# Servers with NVIDIA's Triton, and those with the wheel's.
NVIDIA_SERVERS, SLIM_SERVERS = ("triton-cpu", "triton-gpu"), ("server-a", "server-b")
SERVERS = (*NVIDIA_SERVERS, *SLIM_SERVERS)
PROXY_CONFIG = ROOT / "deploy" / "proxy" / "haproxy.cfg"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# Of the slim image, if the build names none.
(SLIM_EXTRAS,) = re.findall(r"^ARG EXTRAS=(.+)$", (ROOT / SLIM).read_text(), re.M)


def seconds(duration: str) -> float:
    assert duration.endswith("s")
    return float(duration.removesuffix("s"))


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return captured([*map(str, words)], cwd=ROOT, timeout=120)


def test_compose_file_follows_its_schema():
    done = run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)

    assert done.returncode == 0, done.stdout


def test_every_image_is_pinned():
    tags = {name: service["image"].rpartition(":")[2] for name, service in SERVICES.items()}
    for dockerfile in DOCKERFILES:
        defaults = dict(line.split("=", 1) for line in instructions(dockerfile, "ARG") if "=" in line)
        for base in instructions(dockerfile, "FROM"):
            image = re.sub(r"\$\{(\w+)\}", lambda match, known=defaults: known[match[1]], base.split()[0])
            tags[f"{dockerfile}: {base}"] = image.rpartition(":")[2]

    assert {name: tag for name, tag in tags.items() if not re.search(r"\d+\.\d+", tag)} == {}
    built = {name: tags[name] for name, service in SERVICES.items() if "build" in service}
    assert {name: tag for name, tag in built.items() if not f"{tag}-".startswith(f"{VERSION}-")} == {}
    images = Counter(service["image"] for service in SERVICES.values() if "build" in service)
    assert {*images.values()} == {1}, "an image that two services build has two ids"
    ours = {service["image"] for service in SERVICES.values() if service["image"].startswith("nereid-")}
    assert {*images} == ours, "each is built"


@pytest.mark.parametrize("service", SERVERS)
def test_servers_are_guarded_and_supervised(service):
    words = command_line(service)

    entrypoint = [] if service in SLIM_SERVERS else ["/opt/nvidia/nvidia_entrypoint.sh", "nereid"]
    assert words[: len(entrypoint) + 1] == [*entrypoint, "serve"]
    assert {"--host=0.0.0.0", "--keys=/keys/keys.json", "--repository=/data/models"} <= {*words}
    assert "--unguarded" not in words
    assert SERVICES[service]["depends_on"] == {"init": {"condition": "service_completed_successfully"}}
    if service in SLIM_SERVERS:
        # The stub is in the run directory, and Docker's tmpfs runs programs only with `exec`.
        (tmp,) = SERVICES[service]["tmpfs"]
        assert "exec" in tmp.removeprefix("/tmp:").split(",")


def test_nvidias_image_keeps_buffers():
    in_image = dict(word.split("=", 1) for line in instructions(NVIDIAS, "ENV") for word in line.split())

    assert in_image.items() >= {**KEEP_BUFFERS, "ORT_DISABLE_TELEMETRY": "1"}.items()


def test_only_gateways_and_proxy_are_published_beyond_loopback():
    ports = {name: service.get("ports", ()) for name, service in SERVICES.items()}
    beyond = {name for name, maps in ports.items() if any(not port.startswith("127.0.0.1:") for port in maps)}

    assert beyond == {*NVIDIA_SERVERS, "proxy"}
    for service in beyond:
        assert SERVICES[service]["ports"] == ["8080:8000", "8081:8001"]
    assert [name for name in SLIM_SERVERS if "ports" in SERVICES[name]] == []


def test_no_container_has_a_way_out():
    assert DOCUMENT["networks"] == {
        "inside": {"internal": True},
        "outside": {"driver_opts": {"com.docker.network.bridge.enable_ip_masquerade": "false"}},
    }
    for name, service in SERVICES.items():
        if service.get("network_mode") == "none":
            assert "networks" not in service
        else:
            assert {*service["networks"]} == {"inside"} | ({"outside"} if "ports" in service else set()), name
    assert [name for name, service in SERVICES.items() if "ipc" in service] == []


def test_server_is_one_name_for_all_profiles():
    names: dict[str, set[str]] = {"server": set(), "servers": set()}
    for service, settings in SERVICES.items():
        networks = settings.get("networks")
        for name in networks["inside"].get("aliases", ()) if isinstance(networks, dict) else ():
            names[name].add(service)

    assert names == {"server": {*NVIDIA_SERVERS, "proxy"}, "servers": {*SERVERS}}
    assert {"--host=http://server:8000", "--grpc=server:8001"} <= {*SERVICES["locust"]["command"]}


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_is_hardened(service):
    about = SERVICES[service]

    assert about["user"].split(":")[0] not in ("0", "root")
    assert (about["read_only"], about["cap_drop"]) == (True, ["ALL"])
    assert about["security_opt"] == ["no-new-privileges:true"]
    assert about["logging"]["options"] == {"max-size": "10m", "max-file": "3"}
    assert "stop_grace_period" in about
    assert {"privileged", "cap_add"}.isdisjoint(about)
    assert re.fullmatch(r"\d+[mg]b?", about["mem_limit"])
    assert service not in SERVERS or about["pids_limit"] > 0
    for volume in about.get("volumes", ()):
        source, _, *mode = volume.split(":")
        assert mode == ["ro"] or source in DOCUMENT["volumes"], volume
        assert mode == ["ro"] or source != "keys" or service == "init", "only init may change the keys"


def test_requests_have_time_to_end():
    for service in SERVERS:
        (drain_s,) = re.findall(r"--drain-s=(\d+)", " ".join(command_line(service)))
        assert seconds(SERVICES[service]["stop_grace_period"]) > int(drain_s) + STOP_TIMEOUT_S
    (hard_stop,) = re.findall(r"^\s*hard-stop-after (\w+)", PROXY_CONFIG.read_text(), re.M)
    assert seconds(SERVICES["proxy"]["stop_grace_period"]) > seconds(hard_stop)
    (run_s,) = re.findall(r"docker stop --time (\d+)", (ROOT / SLIM).read_text())
    assert int(run_s) > int(drain_s) + STOP_TIMEOUT_S


def test_proxy_allows_as_large_messages_as_the_gateway():
    limits = re.findall(r"a message may have (\d+) bytes.+ gt (\d+) \}", PROXY_CONFIG.read_text())

    assert limits == [(str(GatewaySettings().max_body_bytes + MAX_FRAME_BYTES),) * 2]


def test_health_of_a_server_is_a_correct_response():
    check = ["python3", "/workspace/deploy/healthcheck.py", "--page", "http://127.0.0.1:8003/readyz"]
    for service in SERVERS:
        assert SERVICES[service]["healthcheck"]["test"] == ["CMD", *check]
    for dockerfile in DOCKERFILES:
        (in_image,) = instructions(dockerfile, "HEALTHCHECK")
        assert in_image.endswith(f"CMD {json.dumps(check)}")
    staying = [service for service in SERVICES.values() if service["restart"] != "no"]
    assert {service["healthcheck"]["test"][0] for service in staying} == {"CMD"}
    assert len(staying) == len(SERVICES) - 1, "only `init` ends"


def is_ignored(path: str) -> bool:
    """Return whether .dockerignore excludes a path from the build; the last matching line decides."""
    names = [path, *(str(parent) for parent in Path(path).parents)][: len(Path(path).parts)]
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            if any(fnmatch.fnmatch(name, pattern) for name in names):
                verdict = not line.startswith("!")
    return verdict


def test_nothing_else_gets_into_an_image():
    everything = {source for dockerfile in DOCKERFILES for source, _ in deployment.copies(dockerfile)}
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M)

    assert {*allowed} - {"deploy"} == everything - {"nereid/server/preflight.py"}
    secret = (".env", "keys/keys.json", ".git/config", "model_repository/.x.nereid")
    useless = (".venv/bin/python", "tests/conftest.py", "deploy/kubernetes/base/x.yaml", "nereid/__pycache__")
    assert [path for path in (*secret, *useless) if not is_ignored(path)] == []


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_images_are_installed_by_the_tested_script_and_run_without_root(dockerfile):
    runs = instructions(dockerfile, "RUN")

    halves = [run.split()[-1] for run in runs if "deploy/install.sh " in run]
    assert halves == ["packages", "project"], "so that changed code installs no package again"
    assert [run for run in runs if re.search(r"\b(pip |apt-get|curl|wget)\b", run)] == []
    assert instructions(dockerfile, "USER")[-1] == "1000:1000"


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_dockerfiles_pass_their_linter(dockerfile):
    done = run(Path(sys.executable).with_name("hadolint"), dockerfile)

    assert (done.returncode, done.stdout) == (0, "")


@cases(
    nothing=([], 2, "usage:"),
    place=(["elsewhere", "/nonexistent", "cpu"], 2, "expected venv or system, got 'elsewhere'"),
    backends=(["system", "/nonexistent", "cpu"], 1, "'/nonexistent' has no backend 'python'"),
    embedded=(["system", "{backends}", "cpu,embedded"], 2, "'embedded' installs a second Triton"),
)
def test_install_script_says_what_is_wrong(arguments, code, reason, tmp_path):
    (tmp_path / "python").mkdir()
    arguments = [argument.format(backends=tmp_path) for argument in arguments]

    done = run(ROOT / "deploy/install.sh", *arguments)

    assert (done.returncode, done.stderr.startswith(reason)) == (code, True), done.stderr


@pytest.mark.parametrize("service", [name for name, service in SERVICES.items() if "build" in service])
def test_every_installed_version_is_pinned(service):
    extras = SERVICES[service]["build"].get("args", {}).get("EXTRAS", SLIM_EXTRAS).split(",")
    pins = {line.partition("==")[0] for line in (ROOT / "deploy/constraints.txt").read_text().splitlines()}
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    required = {canonicalize_name(Requirement(line).name) for extra in extras for line in optional[extra]}

    assert required <= pins
    if "gpu13" not in extras:  # its packages are not installed here
        assert installed("nereid-serving", frozenset(extras), set()) - {"nereid-serving"} <= pins


def installed(name: str, extras: frozenset[str], found: set[tuple[str, frozenset[str]]]) -> set[str]:
    """Return the distributions that come along with one; `found` holds those that were looked at."""
    if (name, extras) not in found:
        found.add((name, extras))
        for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
            marker = requirement.marker
            if not marker or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                installed(canonicalize_name(requirement.name), frozenset(requirement.extras), found)
    return {name for name, _ in found}


def test_image_of_locust_has_what_it_imports():
    """It is imported where only the distributions of the image's extras can be."""
    extras = SERVICES["locust"]["build"]["args"]["EXTRAS"].split(",")
    there = installed("nereid-serving", frozenset(extras), set())
    owners = importlib.metadata.packages_distributions()
    absent = {top for top, names in owners.items() if not {*map(canonicalize_name, names)} & there}
    program = f"""
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
importlib.import_module("loadtest.locustfile")
"""

    done = run(sys.executable, "-c", program)

    assert done.returncode == 0, done.stderr[-2000:]


def test_every_variable_is_explained():
    read = dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", COMPOSE.read_text()))
    explained = {}
    for block in deployment.SETTINGS.read_text().strip().split("\n\n"):
        comment = [line for line in block.splitlines() if line.startswith("#")]
        for line in block.splitlines()[len(comment) :]:
            assert comment, f"{line} is not explained"
            name, _, value = line.partition("=")
            explained[name] = value

    # Compose itself reads the first.
    assert explained == {"COMPOSE_PROFILES": "cpu", **read}
