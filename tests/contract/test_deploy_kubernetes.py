"""The manifests: what kustomize makes of them fits Kubernetes' schemas, `nereid serve` and docker compose."""

import json
import re

import kubernetes_validate
import msgspec
import pytest
import yaml

from nereid.backends.routing.assignment import parse_route
from nereid.base.assets import REPOSITORY
from nereid.server.command_line import DEFAULT_PROFILE, GPU_PROFILE
from nereid.server.embedded_server import STOP_TIMEOUT_S
from tests.deployment import SERVICES, SLIM, command_line, instructions
from tests.manifests import FOLDER, container, containers, find, pod, rendered

PROFILES = {
    "overlays/cpu": DEFAULT_PROFILE,
    "overlays/object-storage": DEFAULT_PROFILE,
    "overlays/gpu": GPU_PROFILE,
}
# The oldest supported release, and the newest whose schema is installed.
RELEASES = ("1.30", kubernetes_validate.latest_version())
# Their schemas need a cluster; docs/kubernetes.md lists them.
UNKNOWN = {"ScaledObject", "InferenceService", "ServingRuntime"}
# Images that Compose does not use.
FOREIGN = {"rclone/rclone:1.75.1"}
# Of an autoscaler's target, by its type.
FIELDS = {"Value": "value", "AverageValue": "averageValue"}
HEALTH_CHECK = ["python3", "/workspace/deploy/healthcheck.py"]


def flags(words: list[str]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for word in words:
        name, _, value = word.partition("=")
        values.setdefault(name, []).append(value)
    return values


@pytest.fixture(params=PROFILES)
def overlay(request):
    return request.param


@pytest.fixture
def server(overlay):
    return container(overlay, "server")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("overlay", [*PROFILES, "scaling/keda", "kserve"])
def test_objects_fit_the_schemas(overlay, release):
    for manifest in rendered(overlay):
        assert manifest["metadata"].get("namespace", "nereid") == "nereid"
        if manifest["kind"] not in UNKNOWN:
            kubernetes_validate.validate(manifest, release, strict=True)


def test_server_is_that_of_compose(overlay, server):
    words, _, _ = "\n".join(command_line("triton-cpu")).partition("\n--\n")
    _, *compose = words.splitlines()

    differing = {"--repository", "--drain-s"}
    ours, theirs = flags(server["args"]), flags(compose)
    assert theirs.pop("--otlp"), "Kubernetes has no receiver of traces"
    assert {name for name in ours | theirs if ours.get(name) != theirs.get(name)} == differing
    assert ours.keys() == theirs.keys(), "so it is guarded"
    assert server["env"] == [{"name": "NEREID_PROFILE", "value": PROFILES[overlay]}]


def test_kserve_runs_the_command_of_the_slim_image():
    (server,) = containers("kserve")
    (command,) = instructions(SLIM, "CMD")
    image_command = json.loads(command)

    assert server["args"][: len(image_command)] == image_command
    more = ("--repository", "--profile", "--model-control-mode", "--http-port", "--grpc-port")
    assert {*flags(server["args"][len(image_command) :])} == {*more}
    assert [f"--http-port={port['containerPort']}" in server["args"] for port in server["ports"]] == [True]


@pytest.mark.parametrize("overlay", [*PROFILES, "kserve"])
def test_images_are_those_of_compose(overlay):
    images = {entry["image"] for entry in containers(overlay)}

    assert images <= {service["image"] for service in SERVICES.values()} | FOREIGN
    assert [image for image in images if not re.search(r":[^:/]*\d[^:/]*$", image)] == []


def test_probes_are_those_of_the_supervisor(server):
    pages = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}

    assert {"name": "health", "containerPort": 8003} in server["ports"]
    assert "--health-port=8003" in server["args"]
    for name, page in pages.items():
        assert server[name]["httpGet"] == {"path": page, "port": "health"}


def test_probes_of_kserve_run_the_health_check_which_ends_before_them():
    (server,) = containers("kserve")

    for name, page in (("readinessProbe", "readyz"), ("livenessProbe", "livez")):
        *words, timeout = server[name]["exec"]["command"]
        assert words == [*HEALTH_CHECK, f"--page=http://127.0.0.1:8003/{page}"]
        (timeout_s,) = flags([timeout])["--timeout-s"]
        assert server[name]["timeoutSeconds"] > float(timeout_s)


def test_a_pod_ends_without_losing_requests(overlay, server):
    (drain_s,) = flags(server["args"])["--drain-s"]

    assert int(drain_s) + STOP_TIMEOUT_S < pod(overlay)["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("overlay", [*PROFILES, "kserve"])
def test_containers_may_do_little(overlay):
    for entry in containers(overlay):
        context = entry["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert {*entry["resources"]} == {"requests", "limits"}


def test_pods_may_do_little(overlay, server):
    spec = pod(overlay)

    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    mounts = server["volumeMounts"]
    assert {mount["name"] for mount in mounts if not mount.get("readOnly")} == {"tmp", "shm", "run"}
    (keys,) = (volume["secret"] for volume in spec["volumes"] if volume["name"] == "keys")
    assert keys["defaultMode"] & 0o022 == 0


def test_only_the_gateway_is_published(overlay, server):
    policy, service = find(overlay, "NetworkPolicy")["spec"], find(overlay, "Service")["spec"]

    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert {port["targetPort"] for port in service["ports"]} == {"http", "grpc"}
    clients, monitoring = ({port["port"] for port in rule["ports"]} for rule in policy["ingress"])
    assert clients == {ports["http"], ports["grpc"]}
    assert monitoring == {ports["http"], ports["metrics"], ports["health"]}
    assert all(rule["from"] for rule in policy["ingress"])
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert bool(policy["egress"]) == (overlay == "overlays/object-storage")


def test_selectors_select_the_same_pods(overlay):
    deployment = find(overlay, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]

    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert find(overlay, "Service")["spec"]["selector"] == labels
    assert find(overlay, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    assert find(overlay, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    for scaler in (find(overlay, "HorizontalPodAutoscaler"), find("scaling/keda", "ScaledObject")):
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def test_route_is_the_repositorys(overlay):
    config = find(overlay, "ConfigMap")
    (volume,) = (volume for volume in pod(overlay)["volumes"] if volume["name"] == "routes")

    ((name, text),) = config["data"].items()
    # It names its schema by a path, which leads nowhere from here.
    stored = msgspec.structs.replace(parse_route((REPOSITORY / name).read_bytes()), schema="")
    assert parse_route(text.encode()) == stored
    assert volume["configMap"]["name"] == config["metadata"]["name"] == "nereid-routes"
    assert f"ln -sfn /routes/{name} /models/{name}" in container(overlay, "models")["args"][0]


def test_autoscalers_use_the_same_queries():
    adapter = yaml.safe_load((FOLDER / "scaling" / "hpa" / "prometheus-adapter-values.yaml").read_text())
    hpa = find("overlays/cpu", "HorizontalPodAutoscaler")["spec"]
    keda = find("scaling/keda", "ScaledObject")["spec"]

    queries = {
        rule["name"]["as"]: rule["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="nereid"')
        for rule in adapter["rules"]["external"]
    }
    hpa_triggers = [
        (queries[spec["metric"]["name"]], kind := spec["target"]["type"], int(spec["target"][FIELDS[kind]]))
        for spec in (metric["external"] for metric in hpa["metrics"])
    ]
    assert hpa_triggers == [
        (trigger["metadata"]["query"], trigger["metricType"], int(trigger["metadata"]["threshold"]))
        for trigger in keda["triggers"]
    ]
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (keda["minReplicaCount"], keda["maxReplicaCount"])
    assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
