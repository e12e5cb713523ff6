"""The manifests under the rules of checkov: each exception has a reason."""

import json
import subprocess
import sys

import pytest
import yaml

from tests.manifests import find, rendered

# In an environment of its own: it pins many packages.
PACKAGE = "checkov==3.3.30"
INSTALL_S, WATCHDOG_S = 600, 300
# Source: checkov's policy index for Kubernetes.
EXCEPTIONS = {
    "CKV_K8S_11": "no CPU limit: throttled threads would wait for each other",
    "CKV_K8S_15": "tags are versions, which are never built again",
    "CKV_K8S_40": "uid 1000 is that of NVIDIA's image",
    "CKV_K8S_43": "the overlay of a user names the registry, and can name digests",
}
# The bucket's credentials, which rclone reads from its environment only.
ONLY_THERE = {"overlays/object-storage": {"CKV_K8S_35"}}
# KServe makes the pod: its service account, its own security context, and its network policy.
BY_KSERVE = {"CKV_K8S_38", "CKV_K8S_29", "CKV2_K8S_6"}

pytestmark = pytest.mark.nightly(minutes=1)


@pytest.fixture(scope="module")
def checkov(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkov")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_S)
    install = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE]
    subprocess.run(install, check=True, timeout=INSTALL_S)
    return folder / "bin" / "checkov"


def violations(checkov, path) -> tuple[set[str], int]:
    """Return the rules that a file violates, and the number of rules that it follows."""
    words = ["--file", str(path), "--framework", "kubernetes", "--output", "json", "--skip-download"]
    done = subprocess.run([checkov, *words], capture_output=True, text=True, timeout=WATCHDOG_S)
    report = json.loads(done.stdout)
    failed = {each["check_id"] for each in report["results"]["failed_checks"]}
    return failed, len(report["results"]["passed_checks"])


@pytest.mark.parametrize("overlay", ["overlays/cpu", "overlays/gpu", "overlays/object-storage"])
def test_manifests_follow_the_rules(overlay, checkov, tmp_path):
    objects = [*rendered(overlay)]
    (path := tmp_path / "objects.yaml").write_text(yaml.safe_dump_all(objects))
    planted = json.loads(json.dumps(objects))
    for each in planted:
        if each["kind"] == "Deployment":
            each["spec"]["template"]["spec"]["containers"][0]["securityContext"]["privileged"] = True
    (wrong := tmp_path / "planted.yaml").write_text(yaml.safe_dump_all(planted))

    failed, passed = violations(checkov, path)

    assert failed == EXCEPTIONS.keys() | ONLY_THERE.get(overlay, set())
    assert passed > 50
    assert violations(checkov, wrong)[0] - failed == {"CKV_K8S_16"}


def test_kserve_follows_the_rules(checkov, tmp_path):
    """The rules know no ServingRuntime, so its container and volumes are checked as a pod."""
    spec = find("kserve", "ServingRuntime")["spec"]
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "nereid", "namespace": "nereid"},
        "spec": {"containers": spec["containers"], "volumes": spec["volumes"]},
    }
    (path := tmp_path / "pod.yaml").write_text(yaml.safe_dump(made))

    failed, passed = violations(checkov, path)

    assert failed == EXCEPTIONS.keys() | BY_KSERVE
    assert passed > 10
