"""Pods of the manifests as containers of one engine: with the same commands, users, mounts and limits."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nereid.base.assets import REPOSITORY
from tests.manifests import find, pod
from tools.containers.compose import Engine

UNITS = {"Mi": 2**20, "Gi": 2**30}
# KServe's own init container puts the models there.
KSERVE_MODELS = f"{REPOSITORY}:/mnt/models:ro"


def description(overlay: str) -> dict[str, Any]:
    return find(overlay, "ServingRuntime")["spec"] if overlay == "kserve" else pod(overlay)


@contextmanager
def running(engine: Engine, overlay: str, folder: Path, keys: Path) -> Iterator[str]:
    """Run a pod's init containers, and start its server; yields the container's name."""
    spec, name = description(overlay), f"nereid-pod-{os.getpid()}"
    group = spec.get("securityContext", {}).get("fsGroup")
    for volume in spec["volumes"]:
        fill(volume, overlay, folder / volume["name"], keys, group)
    for container in spec.get("initContainers", ()):
        engine.run("docker", "run", "--rm", "--network", "none", *words(container, spec, folder))
    (server,) = spec["containers"]
    published = [f"127.0.0.1::{port['containerPort']}" for port in server["ports"]]
    models = ["--volume", KSERVE_MODELS] if overlay == "kserve" else []
    ports = [word for port in published for word in ("--publish", port)]
    try:
        detached = ("docker", "run", "--detach", "--name", name, *ports, *models)
        engine.run(*detached, *words(server, spec, folder))
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
        files = {each["path"]: keys.read_bytes() for each in volume["secret"]["items"]}
    for name, content in files.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(mode)
    folder.chmod(0o2777)
    if group:
        for path in (folder, *folder.iterdir()):
            os.chown(path, 0, group)


def words(container: dict[str, Any], spec: dict[str, Any], folder: Path) -> list[str]:
    context = spec.get("securityContext", {}) | container["securityContext"]
    user = f"{context['runAsUser']}:{context.get('runAsGroup', context['runAsUser'])}"
    options = ["--user", user, "--security-opt", "no-new-privileges:true"]
    options += ["--read-only"] if context["readOnlyRootFilesystem"] else []
    options += [f"--cap-drop={name}" for name in context["capabilities"]["drop"]]
    if "fsGroup" in context:
        options += ["--group-add", str(context["fsGroup"])]
    memory = container["resources"]["limits"]["memory"]
    options += ["--memory", str(int(memory[:-2]) * UNITS[memory[-2:]])]
    for each in container.get("env", ()):
        options += ["--env", f"{each['name']}={each['value']}"]
    mediums = {each["name"]: each.get("emptyDir", {}).get("medium") for each in spec["volumes"]}
    for mount in container["volumeMounts"]:
        if mediums[mount["name"]] == "Memory":
            options += ["--tmpfs", f"{mount['mountPath']}:mode=1777,exec"]
        else:
            ending = ":ro" if mount.get("readOnly") else ""
            options += ["--volume", f"{folder / mount['name']}:{mount['mountPath']}{ending}"]
    program, *rest = container.get("command", [""])
    options += ["--entrypoint", program] if program else []
    return [*options, container["image"], *rest, *container.get("args", ())]


def probe(engine: Engine, name: str, container: dict[str, Any], kind: str) -> bool:
    about = container[kind]
    if "exec" in about:
        command = about["exec"]["command"]
    else:
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        page = f"http://127.0.0.1:{ports[about['httpGet']['port']]}{about['httpGet']['path']}"
        fetch = f"import urllib.request; urllib.request.urlopen({page!r}, timeout={about['timeoutSeconds']})"
        command = ["python3", "-c", fetch]
    done = subprocess.run(["docker", "exec", name, *command], env=engine.variables, capture_output=True)
    return done.returncode == 0


def port(engine: Engine, name: str, number: int) -> int:
    return int(engine.run("docker", "port", name, str(number)).splitlines()[0].rpartition(":")[2])
