"""A recogniser of the user's own on the real server: added, published, split, rolled back and removed."""

import json
import os
import subprocess

import pytest

from nereid import Reader
from tests.labels import LABEL, WORDS
from tests.recognisers import raw
from tests.routes import WATCHDOG_S, store_adding, wait_until
from tests.supervised import NEREID, serving

pytest.importorskip("cv2", reason="opencv is not installed: extra text")
pytestmark = pytest.mark.nightly(minutes=2)
PARTS = ["text_detect", "text_direction", "own_network", "own_v1", "own"]


@pytest.mark.parametrize("profile", ["cpu", "ensemble"])
def test_life_of_a_recogniser(tmp_path, profile):
    """Logits and a list of characters become a reader, and a file of PaddleOCR its next version."""
    repository, run = tmp_path / "models", tmp_path / "run"
    characters = raw(tmp_path / "logits.onnx", is_softmax=False, characters=())
    (tmp_path / "characters.txt").write_text("\n".join(characters) + "\n")
    raw(tmp_path / "better.onnx")
    store_adding(repository, "net", 1)  # a server needs a model
    with serving(repository, run, "--profile", profile) as served:

        def nereid(*words: str) -> str:
            line = [NEREID, *words, "--repository", str(repository)]
            environment = os.environ | {"XDG_RUNTIME_DIR": str(run)}
            done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=WATCHDOG_S)
            assert done.returncode == 0, done.stderr
            return done.stdout + done.stderr

        def read(variant: str | None = None) -> tuple[str, list[str]]:
            options = {"variant": variant} if variant else {}
            with Reader(f"127.0.0.1:{served.ports['grpc']}", "grpc", "own") as reader:
                found = reader.read(LABEL, **options)
            return found.variant, [line.text for line in found.lines]

        labels = ["--labels", str(tmp_path / "characters.txt")]
        nereid("add", str(tmp_path / "logits.onnx"), "--name", "own", "--task", "read", "--yes", *labels)
        first = read()
        # The machine that tests is busy, and this test is not about latency.
        nereid("publish", "own", str(tmp_path / "better.onnx"), "--share", "50%", "--max-slowdown", "100")
        second = read("v2")
        nereid("rollback", "own")
        wait_until(lambda: {read()[0] for _ in range(5)} == {"v1"}, "the rollback")
        nereid("retire", "own", "2")
        shown = json.loads(nereid("versions", "own", "--json"))
        removed = nereid("remove", "own", "--yes")

        assert (first, second) == (("v1", WORDS), ("v2", WORDS))
        assert [each["version"] for each in shown["versions"]] == [1]
        assert [f"{each}: removed" in removed for each in PARTS] == [True] * len(PARTS)
        assert [each.name for each in repository.iterdir() if each.is_dir()] == ["net"]
