"""docker-compose.yml in a real engine, in a copy of the checkout with nothing prepared.

The base images are stand-ins of the same names: tools/containers/bases.sh. `nereid-triton` contains the
Triton of the wheel instead of NVIDIA's.
"""

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from nereid.base.assets import COFFEE, REPOSITORY
from nereid.client.client_errors import RequestRefused
from nereid.gateway import key_changes
from nereid.tasks.classify.client import Classifier
from tests.deployment import NVIDIAS, SLIM
from tests.e2e.conftest import ESPRESSO
from tests.manifests import find, pod
from tests.routes import wait_until
from tests.tables import cases
from tools.containers import compose
from tools.containers.compose import COMMAND_S, UP_S, Load, Project

pytestmark = [
    pytest.mark.nightly(minutes=12),
    pytest.mark.skipif(os.getuid() != 0 or not shutil.which("apt-get"), reason="needs root and Debian's apt"),
]

# Words in the command lines of processes, and the line of the log when each has been replaced. A stub of the
# route is always in use; those of other models may just have been replaced, and are then not repaired.
REPAIRS = {
    "triton_python_backend_stub /data/models/classify/": ": loaded again in",
    "bin/tritonserver": "tritonserver is ready again",
    "gateway_program gateway": "the gateway exited with status",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[compose.Engine]:
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(compose.engine())
        except compose.NoEngine as reason:
            pytest.skip(f"no container engine starts here: {reason}")
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return compose.copy_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="class")
def default(engine, folder, request):
    with compose.project(engine, folder) as project:
        project.up("--build")
        failed_before = request.session.testsfailed
        yield project
        if request.session.testsfailed > failed_before:
            pytest.fail(project.compose("logs", "--tail", "300", "triton-cpu"))


@pytest.fixture(scope="class")
def scale(engine, folder):
    with compose.project(engine, folder, "scale") as project:
        project.up("--build")
        yield project


class TestDefault:
    def test_first_request_is_answered(self, default):
        with urllib.request.urlopen(f"http://{default.url('http')}/", timeout=COMMAND_S) as page:
            assert page.status == 200
        for protocol in ("http", "grpc"):
            with Classifier(default.url(protocol), protocol, api_key=default.key) as classifier:
                assert classifier.classify(COFFEE).labels[0].index == ESPRESSO
            with Classifier(default.url(protocol), protocol) as classifier, pytest.raises(RequestRefused):
                classifier.classify(COFFEE)

    def test_second_start_keeps_key_and_models(self, default):
        key = default.key
        default.nereid("route", "set", "v1=30", "v2=70")

        default.up("--force-recreate", "--timeout", "60")

        assert default.key == key
        assert "v1 30 %" in default.nereid("route", "show")

    def test_nobody_is_root_and_nothing_is_writable(self, default):
        services = default.compose("ps", "--services").split()
        users = {service: default.compose("exec", "-T", service, "id", "-u").strip() for service in services}
        writes = [
            service
            for service in services
            if default.compose("exec", "-T", service, "sh", "-c", "touch /etc/x 2>&1 || echo no").strip()[-2:]
            != "no"
        ]

        assert {service for service, user in users.items() if user == "0"} == set()
        assert writes == []

    def test_publish_route_and_rollback_lose_nothing(self, default):
        network = "efficientnet_lite0/1/model.onnx"
        changed = onnx.load(REPOSITORY / network)
        changed.doc_string = "of other bytes"
        onnx.save(changed, default.folder / "new.onnx")
        with Load(default) as load:
            words = ("--share", "10%", "--max-slowdown", "100")
            default.nereid("publish", "classify", f"/data/models/{network}", *words)
            assert post(default, "classify", (default.folder / "new.onnx").read_bytes()) == 4
            default.nereid("route", "set", "v1=40", "v2=40", "v3=20")
            load.wait_answers()
            default.nereid("rollback", "classify")
            load.wait_answers()

        assert load.failures == []

    @pytest.mark.parametrize(("words", "repair"), REPAIRS.items())
    def test_killed_process_is_replaced(self, default, words, repair):
        """Callers that retry may see errors until each has right answers after the repair; then none."""

        def repairs() -> int:
            return default.compose("logs", "--no-log-prefix", "triton-cpu").count(repair)

        before = repairs()
        with Load(default) as load:
            os.kill(default.pids("triton-cpu", words)[-1], 9)  # the youngest
            wait_until(lambda: repairs() > before, "the repair", COMMAND_S)
            wait_until(default.is_ready, "ready", COMMAND_S)
            load.wait_right_answers(25)
            # A request that was inside the killed process fails 30 s later, when its timeout ends.
            repaired_s = time.monotonic()
            load.wait_answers(100)

        assert [failure for failure in load.failures if failure.sent_s > repaired_s] == []

    def test_prometheus_scrapes_everything(self, default):
        port = default.engine.variables["PROMETHEUS_PORT"]

        def jobs() -> set[str]:
            address = f"http://127.0.0.1:{port}/api/v1/targets"
            with urllib.request.urlopen(address, timeout=COMMAND_S) as page:
                targets = json.load(page)["data"]["activeTargets"]
            return {target["labels"]["job"] for target in targets if target["health"] == "up"}

        wait_until(lambda: jobs() == {"server", "gateway", "supervisor"}, "targets", COMMAND_S)

    def test_stop_is_in_time(self, default):
        default.compose("stop", limit_s=UP_S)

        lines = default.compose("ps", "--all", "--format", "{{.Service}} {{.ExitCode}}").splitlines()
        codes = dict(line.split() for line in lines)
        # Debian's Prometheus and the placeholders end as their own signals say.
        assert {service: codes[service] for service in ("init", "triton-cpu", "publisher")} == dict.fromkeys(
            ("init", "triton-cpu", "publisher"), "0"
        )


def post(project: Project, model: str, body: bytes) -> int:
    words = ("run", "--rm", "--no-deps", "--entrypoint", "cat", "init", "/keys/publisher.key")
    headers = {"x-api-key": project.compose(*words).strip(), "content-type": "application/octet-stream"}
    address = f"http://{project.url('http')}/v1/models/{model}/publish?max_slowdown=100"
    with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=COMMAND_S) as answer:
        return json.load(answer)["version"]


class TestScale:
    def test_second_start_replaces_nothing(self, scale):
        containers = scale.compose("ps", "--quiet")

        scale.up()

        assert scale.compose("ps", "--quiet") == containers

    def test_kill_and_rolling_restart_are_not_noticed(self, scale):
        with Load(scale) as load:
            scale.compose("kill", "server-a")
            load.wait_answers(100)
            scale.up()
            load.wait_answers(100)
            for service in ("server-a", "server-b"):
                scale.compose("restart", service)
                scale.up()
            load.wait_answers(100)

        assert load.failures == []


UNITS = {"Mi": 2**20, "Gi": 2**30}
# KServe's own init container puts the models there.
KSERVE_MODELS = f"{REPOSITORY}:/mnt/models:ro"


@contextlib.contextmanager
def running_pod(
    engine: compose.Engine, spec: dict[str, Any], overlay: str, folder: Path, keys: Path
) -> Iterator[str]:
    """Run a pod's init containers, and start its server; yields the container's name."""
    name = f"nereid-pod-{os.getpid()}"
    group = spec.get("securityContext", {}).get("fsGroup")
    for volume in spec["volumes"]:
        fill(volume, overlay, folder / volume["name"], keys, group)
    for container in spec.get("initContainers", ()):
        engine.run("docker", "run", "--rm", "--network", "none", *run_words(container, spec, folder))
    (server,) = spec["containers"]
    published = [f"127.0.0.1::{port['containerPort']}" for port in server["ports"]]
    models = ["--volume", KSERVE_MODELS] if overlay == "kserve" else []
    ports = [word for port in published for word in ("--publish", port)]
    try:
        detached = ("docker", "run", "--detach", "--name", name, *ports, *models)
        engine.run(*detached, *run_words(server, spec, folder))
        yield name
    except Exception as error:
        error.add_note(engine.run("sh", "-c", f"docker logs --tail 60 {name} 2>&1", may_fail=True))
        raise
    finally:
        engine.run("docker", "rm", "--force", name, may_fail=True)


def fill(volume: dict[str, Any], overlay: str, folder: Path, keys: Path, group: int | None) -> None:
    folder.mkdir(parents=True)
    files: dict[str, bytes] = {}
    mode = 0o644
    if "configMap" in volume:
        files = {name: text.encode() for name, text in find(overlay, "ConfigMap")["data"].items()}
    if "secret" in volume:
        mode = volume["secret"]["defaultMode"]
        files = {item["path"]: keys.read_bytes() for item in volume["secret"]["items"]}
    for name, content in files.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(mode)
    folder.chmod(0o2777)
    if group:
        for path in (folder, *folder.iterdir()):
            os.chown(path, 0, group)


def run_words(container: dict[str, Any], spec: dict[str, Any], folder: Path) -> list[str]:
    context = spec.get("securityContext", {}) | container["securityContext"]
    user = f"{context['runAsUser']}:{context.get('runAsGroup', context['runAsUser'])}"
    options = ["--user", user, "--security-opt", "no-new-privileges:true"]
    options += ["--read-only"] if context["readOnlyRootFilesystem"] else []
    options += [f"--cap-drop={name}" for name in context["capabilities"]["drop"]]
    if "fsGroup" in context:
        options += ["--group-add", str(context["fsGroup"])]
    memory = container["resources"]["limits"]["memory"]
    options += ["--memory", str(int(memory[:-2]) * UNITS[memory[-2:]])]
    for variable in container.get("env", ()):
        options += ["--env", f"{variable['name']}={variable['value']}"]
    mediums = {volume["name"]: volume.get("emptyDir", {}).get("medium") for volume in spec["volumes"]}
    for mount in container["volumeMounts"]:
        if mediums[mount["name"]] == "Memory":
            options += ["--tmpfs", f"{mount['mountPath']}:mode=1777,exec"]
        else:
            ending = ":ro" if mount.get("readOnly") else ""
            options += ["--volume", f"{folder / mount['name']}:{mount['mountPath']}{ending}"]
    program, *rest = container.get("command", [""])
    options += ["--entrypoint", program] if program else []
    return [*options, container["image"], *rest, *container.get("args", ())]


def probe(engine: compose.Engine, name: str, container: dict[str, Any], kind: str) -> bool:
    about = container[kind]
    if "exec" in about:
        command = about["exec"]["command"]
    else:
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        page = f"http://127.0.0.1:{ports[about['httpGet']['port']]}{about['httpGet']['path']}"
        fetch = f"import urllib.request; urllib.request.urlopen({page!r}, timeout={about['timeoutSeconds']})"
        command = ["python3", "-c", fetch]
    done = subprocess.run(["docker", "exec", name, *command], env=engine.variables, capture_output=True)
    return done.returncode == 0


@cases(
    deployment=("overlays/cpu", NVIDIAS, "cpu,gateway,publish", 8000),
    kserve=("kserve", SLIM, "embedded,cpu,gateway", 8080),
)
def test_pod_of_the_manifests_serves(overlay, dockerfile, extras, http, engine, folder, tmp_path):
    spec = find(overlay, "ServingRuntime")["spec"] if overlay == "kserve" else pod(overlay)
    (server,) = spec["containers"]
    words = ("--file", dockerfile, "--build-arg", f"EXTRAS={extras}", "--tag", server["image"], ".")
    engine.run("docker", "build", *words, folder=folder, limit_s=compose.MAKE_S)
    key = key_changes.add(tmp_path / "keys.json", "me", ["infer"], None)

    with running_pod(engine, spec, overlay, tmp_path / "volumes", tmp_path / "keys.json") as name:
        wait_until(lambda: probe(engine, name, server, "readinessProbe"), "ready", COMMAND_S)
        kinds = [kind for kind in server if kind.endswith("Probe")]
        probes = {kind: probe(engine, name, server, kind) for kind in kinds}
        address = engine.run("docker", "port", name, str(http)).splitlines()[0]
        with Classifier(address, "http", api_key=key) as classifier:
            index = classifier.classify(COFFEE).labels[0].index
        grace_s = str(spec.get("terminationGracePeriodSeconds", 30))
        engine.run("docker", "stop", "--time", grace_s, name)
        code = engine.run("docker", "inspect", "--format", "{{.State.ExitCode}}", name).strip()

    assert (probes, index, code) == (dict.fromkeys(kinds, True), ESPRESSO, "0")
