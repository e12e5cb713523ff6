"""Objects that kustomize renders from the manifests in deploy/kubernetes."""

import shutil
from functools import cache
from typing import Any

import pytest
import yaml

from tests.commands import captured
from tests.conftest import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"


@cache
def rendered(overlay: str) -> tuple[dict[str, Any], ...]:
    kubectl = shutil.which("kubectl")
    if not kubectl:
        pytest.skip("kubectl is not installed; fix: apt-get install kubernetes-client")
    done = captured([kubectl, "kustomize", str(FOLDER / overlay)], timeout=60)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def find(overlay: str, kind: str) -> dict[str, Any]:
    (manifest,) = (manifest for manifest in rendered(overlay) if manifest["kind"] == kind)
    return manifest


def pod(overlay: str) -> dict[str, Any]:
    spec: dict[str, Any] = find(overlay, "Deployment")["spec"]["template"]["spec"]
    return spec


def container(overlay: str, name: str) -> dict[str, Any]:
    (entry,) = (entry for entry in containers(overlay) if entry["name"] == name)
    return entry


def containers(overlay: str) -> list[dict[str, Any]]:
    if overlay == "kserve":
        return list(find(overlay, "ServingRuntime")["spec"]["containers"])
    return [*pod(overlay)["initContainers"], *pod(overlay)["containers"]]
