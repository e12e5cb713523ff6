"""A further task is one folder: masks, in a copy of the package to which nothing else is added."""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
from onnx import TensorProto

from nereid.base.assets import COFFEE
from tests.conftest import ROOT
from tests.environments import Environment
from tests.networks import written
from tests.pictures import encode

pytestmark = pytest.mark.slow
SIDE, WATCHDOG_S = 32, 120
# What a checkout serves; the package finds them beside itself.
COPIED = ("nereid", "python_backend", "model_repository", "clients/samples")
# The client of the copy prints its mask as JSON.
CLIENT = """
import json, sys
from nereid.tasks.segment.client import Segmenter
with Segmenter(sys.argv[1], model="scene") as segmenter:
    print(json.dumps(segmenter.segment(sys.argv[2]).classes.tolist()))
"""


def segmenter() -> onnx.ModelProto:
    """Build a network whose class of a pixel is that of its largest channel: red, green or blue."""
    io = f"(float[N,3,{SIDE},{SIDE}] image) => (uint8[N,{SIDE},{SIDE}] mask)"
    classes = "logits = Conv(image, weights) classes = ArgMax <axis = 1, keepdims = 0> (logits)"
    weights = np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1)
    return written(f"{io} {{ {classes} mask = Cast <to = {TensorProto.UINT8}> (classes) }}", weights=weights)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Environment:
    """An environment whose package is a copy with one more folder; all other packages are the parent's."""
    base = tmp_path_factory.mktemp("fifth")
    environment = base / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    ours = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    for name in COPIED:
        unused = shutil.ignore_patterns("__pycache__", "*.history.jsonl")
        shutil.copytree(ROOT / name, Path(ours, name), ignore=unused)
    segment = ROOT / "tests" / "fifth_task" / "segment"
    shutil.copytree(segment, Path(ours, "nereid/tasks/segment"), ignore=shutil.ignore_patterns("__pycache__"))
    # Its own packages come first. The parent's editable install is not followed.
    Path(ours, "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (base / "run").mkdir()
    return Environment(environment, base / "run")


def test_a_task_in_one_folder_is_added_served_and_answered(copy, tmp_path, monkeypatch):
    """Added with its name, found without it, listed in the help; REST, client and command return the mask."""
    pixels = np.random.default_rng(4).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
    image, expected = encode(pixels), pixels.argmax(-1).tolist()
    (copy.folder / "scene.png").write_bytes(image)
    onnx.helper.set_model_props(model := segmenter(), {"task": "segment"})  # refused without this task
    onnx.save(model, copy.folder / "scene.onnx")
    monkeypatch.setenv("NEREID_REPOSITORY", str(copy.folder / "models"))
    nereid = "python", "-m", "nereid"
    copy.run(*nereid, "init", "models")
    how = "--preprocess", "resize=exact", "--preprocess", "scale=1"
    line = *nereid, "add", "scene.onnx", "--name", "scene", *how
    shown = json.loads(copy.run(*line, "--json").partition("\n")[0])
    added = copy.captured(*line, "--task", "segment", "--instances", "1", "--yes", "--images", COFFEE)
    ports = [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", "0")]

    with (
        copy.announcing(tmp_path / "serve.log", *nereid, "serve", *ports) as (_, server),
        copy.announcing(tmp_path / "gateway.log", *nereid, "gateway", "--port", "0") as (_, gateway),
    ):
        address = f"http://127.0.0.1:{gateway['http']}"
        png = {"Content-Type": "image/png"}
        answer = httpx.post(f"{address}/v1/segment", content=image, headers=png, timeout=WATCHDOG_S).json()
        paths = httpx.get(f"{address}/openapi.json", timeout=WATCHDOG_S).json()["paths"]
        client = json.loads(copy.run("python", "-c", CLIENT, f"127.0.0.1:{server['grpc']}", "scene.png"))
        printed = json.loads(copy.run(*nereid, "segment", "scene.png", "--model", "scene", "--json"))
        labels = copy.run(*nereid, "classify", COFFEE)

    assert shown["task"] == "segment"
    assert (added.returncode, f"{SIDE} x {SIDE}" in added.stderr) == (0, True), added.stderr
    assert answer["mask"] == client == printed[0]["classes"] == expected
    assert (answer["model"], answer["variant"], answer["version"]) == ("scene", "v1", "1")
    assert {"/v1/segment", "/v1/models/{model}/segment"} <= paths.keys()
    assert "espresso" in labels
    assert "segment" in copy.run(*nereid, "--help")
