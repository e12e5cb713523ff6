"""A pod without a cluster: the init container's script prepares the repository of a real server."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nereid.base.assets import REPOSITORY
from tests.conftest import ROOT
from tests.manifests import container
from tests.publishing import contents
from tests.routes import WATCHDOG_S

OVERLAYS = ("overlays/cpu", "overlays/object-storage")
ROUTE = "classify.route.json"


@pytest.fixture
def root(tmp_path):
    """Where an init container's file system begins: the image's checkout, a bucket, and empty folders."""
    for name in ("models", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "workspace").symlink_to(ROOT)
    (tmp_path / "bucket" / "nereid" / "model_repository").mkdir(parents=True)
    (tmp_path / "bucket" / "nereid" / "model_repository" / "1").symlink_to(REPOSITORY)
    return tmp_path


def prepare(overlay: str, root: Path) -> None:
    init = container(overlay, "models")
    (lines,) = init["args"]
    # Not the `models:` of rclone.
    there = re.sub(r"(?<![\w:])/(?=(models|routes|workspace)\b)", f"{root}/", lines)
    variables = {variable["name"]: variable["value"] for variable in init.get("env", ())}
    bucket = {"RCLONE_CONFIG_MODELS_TYPE": "alias", "RCLONE_CONFIG_MODELS_REMOTE": str(root / "bucket")}
    environment = {**os.environ, **variables, **bucket, "HOME": str(root / "tmp")}
    subprocess.run([*init["command"], there], env=environment, check=True, timeout=WATCHDOG_S)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_has_the_repository_and_the_mounted_route(overlay, root):
    """The init container may run again: an old link and a removed model do not stay."""
    if overlay == "overlays/object-storage" and not shutil.which("rclone"):
        pytest.skip("rclone is not installed; fix: apt-get install rclone")

    prepare(overlay, root)
    shutil.copytree(root / "models" / "classify", root / "models" / "gone")
    prepare(overlay, root)

    assert contents(root / "models") | {ROUTE: ""} == contents(REPOSITORY) | {ROUTE: ""}
    assert (root / "models" / ROUTE).readlink() == root / "routes" / ROUTE
