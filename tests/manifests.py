"""Objects that kustomize renders from the manifests in deploy/kubernetes."""

import shutil
import subprocess
from functools import cache
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"


def kubectl() -> str:
    """Return the path of kubectl, which has kustomize."""
    found = shutil.which("kubectl")
    if not found:
        pytest.skip("kubectl is not installed; fix: apt-get install kubernetes-client")
    return found


@cache
def rendered(overlay: str) -> tuple[dict[str, Any], ...]:
    """Return the objects of an overlay."""
    done = subprocess.run(
        [kubectl(), "kustomize", str(FOLDER / overlay)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def find(overlay: str, kind: str) -> dict[str, Any]:
    """Return the one object of a kind."""
    (found,) = (each for each in rendered(overlay) if each["kind"] == kind)
    return found


def pod(overlay: str) -> dict[str, Any]:
    """Return the specification of an overlay's pods."""
    spec: dict[str, Any] = find(overlay, "Deployment")["spec"]["template"]["spec"]
    return spec


def container(overlay: str, name: str) -> dict[str, Any]:
    """Return one container of the pods."""
    (found,) = (each for each in containers(overlay) if each["name"] == name)
    return found


def containers(overlay: str) -> list[dict[str, Any]]:
    """Return all containers, in the order in which they start."""
    if overlay == "kserve":
        return list(find(overlay, "ServingRuntime")["spec"]["containers"])
    return [*pod(overlay)["initContainers"], *pod(overlay)["containers"]]
