"""Every command of docs/your-model.md, in its order, as a new user would run it."""

import json
import os
import re
import shlex
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import onnx
import pytest
from onnx import helper

from nereid.base.assets import CHELSEA, COFFEE
from tests.commands import captured
from tests.supervised import ANY_PORTS, announcing
from tests.user_networks import CLASSES, UserNetwork

PAGE = Path(__file__).parents[2] / "docs" / "your-model.md"
NAMES = ["beagle", "boxer", "collie", "husky", "poodle"]
WATCHDOG_S = 120
# Commands that keep their terminal; a free port replaces the usual one.
KEPT = {"nereid serve": ANY_PORTS, "nereid gateway": ["--port", "0"]}
# Commands that wait for an answer.
ASKING = ("nereid add", "nereid remove")


def commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


def snippet(word: str) -> tuple[str, str]:
    """Return the program of the page that contains a word, and what its comment says that it prints."""
    (program,) = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if word in block
    ]
    return program, program.rpartition("  # ")[2]


def exporters() -> dict[str, str]:
    return dict(re.findall(r"^\| (.+?) \| `(nereid add .+?)` \|$", PAGE.read_text(), re.MULTILINE))


@pytest.fixture
def folder(tmp_path):
    assert len(NAMES) == CLASSES
    (tmp_path / "dogs.txt").write_text("".join(f"{name}\n" for name in NAMES))
    shutil.copy(COFFEE, tmp_path / "photo.jpg")
    shutil.copy(CHELSEA, tmp_path / "cat.jpg")
    onnx.save(UserNetwork().build(), tmp_path / "dogs.onnx")
    onnx.save(UserNetwork(weights=2).build(), tmp_path / "better.onnx")
    (tmp_path / "timm").mkdir()
    onnx.save(UserNetwork().build(), tmp_path / "timm" / "dogs.onnx")
    config = {"input_size": [3, 16, 16], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.875}
    (tmp_path / "timm" / "config.json").write_text(json.dumps({"pretrained_cfg": config}))
    ultralytics = UserNetwork(batch=1, activation="softmax").build()
    names = {"task": "classify", "imgsz": "[16, 16]", "names": repr(dict(enumerate(NAMES)))}
    helper.set_model_props(ultralytics, names)
    onnx.save(ultralytics, tmp_path / "yolo.onnx")
    for name in ("keras", "plain"):
        onnx.save(UserNetwork("NHWC", activation="softmax").build(), tmp_path / f"{name}.onnx")
    return tmp_path


class Terminal:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        (folder / "run").mkdir(mode=0o700)
        search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": search, "XDG_RUNTIME_DIR": str(folder / "run")}
        self._folder, self._stack, self._port = folder, stack, 0

    def run(self, command: str) -> str:
        """Run a command, and return its stdout; one that keeps its terminal is left running."""
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self.environment[name] = value.replace("$PWD", str(self._folder))
            return ""
        if command in KEPT:
            return self._keep(command)
        answer = " --yes" if command.startswith(ASKING) else ""
        shell = command.replace("localhost:8080", f"localhost:{self._port}") + answer
        done = captured(["bash", "-c", shell], cwd=self._folder, env=self.environment, timeout=WATCHDOG_S)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def _keep(self, command: str) -> str:
        words, log = [*command.split(), *KEPT[command]], self._folder / f"{command}.log"
        running = announcing(words, log, cwd=self._folder, env=self.environment)
        _, ports = self._stack.enter_context(running)
        self._port = ports["http"]
        return json.dumps(ports)


@pytest.mark.nightly(minutes=1)
def test_walk_through_the_page(folder):
    seen: dict[str, str] = {}
    with ExitStack() as stack:
        terminal = Terminal(folder, stack)
        for command in commands():
            seen[command] = terminal.run(command)
            if command.startswith("nereid embed"):
                ports = json.loads(seen["nereid serve"])
                program, said = snippet("Embedder")
                program = program.replace("localhost:8001", f"127.0.0.1:{ports['grpc']}")
                printed = terminal.run(f"python -c {shlex.quote(program)}")
            if command.startswith("nereid remove"):
                left = json.loads(terminal.run("nereid status --json"))

    (shown,) = [text for command, text in seen.items() if command.startswith("nereid classify")]
    assert "variant v1 by weight" in shown
    assert all(name in shown for name in NAMES)
    assert (folder / "seen.png").stat().st_size > 0
    assert (printed, "1280" in seen["nereid embed photo.jpg cat.jpg --model photos"]) == (said, True)
    (answer,) = [json.loads(text) for command, text in seen.items() if command.startswith("curl")]
    assert (answer["model"], answer["predictions"][0]["label"] in NAMES) == ("dogs", True)
    assert "dogs 10 %" in seen["nereid versions dogs"]
    assert "v1 90 %, v2 10 %" in seen["nereid status"]
    assert re.search(r"gateway +http://127\.0\.0\.1:\d+, pid \d+", seen["nereid status"])
    assert "v1 50 %, v2 50 %" in seen["nereid route set v1=50 v2=50 --model dogs"]
    assert "v1 100 %, v2 0 %" in seen["nereid rollback dogs"]
    assert "0 failures" in seen["nereid check"]
    assert not [model["name"] for model in left["models"] if model["name"].startswith("dogs")]


HALVES = "127.5, 127.5, 127.5"
PREPROCESSING = {
    "torchvision, or trained like it": {"preset": "imagenet", "resize_shorter_px": "18"},
    "timm": {"mean": HALVES, "resize_shorter_px": "18"},
    "Ultralytics": {"resize_shorter_px": "16", "scale": str(1 / 255)},
    "Keras, with a layer `Rescaling` in the network": {"resize": "exact", "scale": "1", "layout": "NHWC"},
    "Keras, with pixels from −1 to 1": {"resize": "exact", "mean": HALVES, "std": HALVES},
}


@pytest.mark.parametrize("exporter", PREPROCESSING)
def test_network_of_each_exporter_is_read_as_the_page_says(folder, exporter):
    with ExitStack() as stack:
        terminal = Terminal(folder, stack)
        terminal.environment["NEREID_REPOSITORY"] = str(folder / "models")
        proposal = json.loads(terminal.run(f"{exporters()[exporter]} --json"))

    assert proposal["parameters"].items() >= PREPROCESSING[exporter].items()
    labels = "the file's metadata 'names'" if exporter == "Ultralytics" else "'dogs.txt'"
    assert proposal["labels"] == {"count": CLASSES, "from": labels}
    appended = [line for line in proposal["changes"] if "softmax" in line]
    assert bool(appended) == (exporter in ("torchvision, or trained like it", "timm"))


def test_the_page_has_a_command_for_each_exporter():
    assert exporters().keys() == PREPROCESSING.keys()
    assert len(commands()) >= 20
