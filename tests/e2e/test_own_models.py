"""The user's own models of three tasks: added, published, shadowed, split, rolled back, removed."""

import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from nereid import Detection, Detector, Embedder, Reader, Reading
from nereid.base.assets import COFFEE
from tests.detectors import CLASSES, KNOWN, TestDetector, moved
from tests.embedders import UNIT, convolutional, embeddings, small
from tests.labels import LABEL, WORDS
from tests.recognisers import raw, retrained
from tests.routes import store_adding, wait_until
from tests.supervised import Served, serving
from tests.tables import cases
from tests.watches import watching

pytest.importorskip("cv2", reason="opencv is not installed: extra text")
pytestmark = pytest.mark.nightly(minutes=5)
PARTS = {
    "detect": ("cars_network", "cars_preprocess", "cars_boxes", "cars_v1", "cars"),
    "embed": ("faces_network", "faces_preprocess", "faces_v1", "faces"),
    "read": ("text_detect", "text_direction", "own_network", "own_v1", "own"),
}


@dataclass(frozen=True)
class Own:
    """A user's files for one task: three networks, the last one for the drop folder, and options to add them.

    `words` is what the first two return for the photo, `last_words` what the third does.
    """

    task: str
    name: str
    kind: Any
    photo: Any
    words: list[str]
    last_words: list[str]
    first: Path
    second: Path
    third: Path
    more: tuple[str, ...]

    def ask(self, address: str, protocol: Any = "grpc", **options: str) -> tuple[str, list[str]]:
        with self.kind(address, protocol, self.name) as client:
            result = getattr(client, self.task)(self.photo, **options)
        return result.variant, words_of(result)


def words_of(found: Any) -> list[str]:
    """Return the lines of a reading, the labels of a detection, or the largest components of an embedding."""
    match found:
        case Reading():
            return [line.text for line in found.lines]
        case Detection():
            return [detected.label for detected in found.objects]
    return largest(found.vector)


def largest(vector: np.ndarray) -> list[str]:
    return [str(index) for index in np.argsort(vector)[-3:]]


def store_detectors(folder: Path) -> Own:
    """Write networks of one exporter and of another, whose tensors have other names."""
    first, second = TestDetector("detr_sigmoid"), TestDetector("detr_sigmoid", moved(right=1.0), batch=1)
    third = TestDetector("detr_sigmoid", moved(KNOWN[:1]))
    later = second.build()
    for old, new in (("logits", "scores_of_classes"), ("pred_boxes", "places")):
        for output in later.graph.output:
            output.name = new if output.name == old else output.name
        for node in later.graph.node:
            node.output[:] = [new if name == old else name for name in node.output]
    paths = [folder / f"{name}-detector.onnx" for name in ("first", "second", "third")]
    for path, model in zip(paths, (first.build(), later, third.build()), strict=True):
        onnx.save(model, path)
    (folder / "labels.txt").write_text("\n".join(CLASSES) + "\n")
    more = "--preset", "rtdetr", "--head", "detr_sigmoid", "--labels", str(folder / "labels.txt")
    words = [CLASSES[index] for _, _, index in KNOWN]
    return Own("detect", "cars", Detector, COFFEE, words, words[:1], *paths, more)


def store_recognisers(folder: Path) -> Own:
    """Write logits with a list of characters, the file of PaddleOCR, and one that is trained further."""
    characters = raw(folder / "logits.onnx", is_softmax=False, characters=())
    (folder / "characters.txt").write_text("\n".join(characters) + "\n")
    raw(folder / "better.onnx")
    paths = folder / "logits.onnx", folder / "better.onnx", retrained(folder / "best.onnx")
    more = "--labels", str(folder / "characters.txt")
    return Own("read", "own", Reader, LABEL, WORDS, WORDS, *paths, more)


def store_embedders(folder: Path) -> Own:
    """Write one network as two exporters do, and another one whose vectors have any length."""
    made = [*(convolutional(UNIT[name]) for name in ("torch", "tensorflow")), convolutional(seed=2)]
    paths = [folder / f"{name}-embedder.onnx" for name in ("first", "second", "third")]
    for path, model in zip(paths, made, strict=True):
        onnx.save(model, path)
    photo = small(COFFEE)
    first, _, third = (largest(embeddings(model, photo)[0]) for model in made)
    assert first != third
    more = "--preprocess", "resize=exact", "--preprocess", f"scale={1 / 255}"
    return Own("embed", "faces", Embedder, photo, first, third, *paths, more)


@contextmanager
def calling(served: Served, model: Own) -> Iterator[Counter[str]]:
    """Send requests over both protocols all the time; none may fail. Gives the number of each variant."""
    variants, failures, is_over = Counter[str](), list[str](), threading.Event()

    def call(protocol: str) -> None:
        while not is_over.wait(0.1):  # otherwise the publications have no core
            try:
                variant, words = model.ask(f"127.0.0.1:{served.ports[protocol]}", protocol)
            except Exception as error:  # reported at the end
                failures.append(repr(error))
                continue
            if words != model.words:
                failures.append(f"{variant}: {words}")
            variants[variant] += 1

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call, protocol) for protocol in ("http", "grpc")]
        try:
            yield variants
        finally:
            is_over.set()
    assert [*filter(None, (future.result() for future in calls)), *failures] == []


@pytest.fixture(scope="module", params=["cpu", "ensemble"])
def served(request, tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    store_adding(folder / "models", "net", 1)  # a server needs a model
    with serving(folder / "models", folder / "run", "--profile", request.param) as running:
        yield running


@cases("store", detector=store_detectors, recogniser=store_recognisers, embedder=store_embedders)
def test_life_of_a_model(served, tmp_path, store):
    server, model, repository = served, store(tmp_path), served.repository
    address = f"127.0.0.1:{server.ports['grpc']}"

    def document() -> dict[str, Any]:
        return dict(json.loads((repository / f"{model.name}.route.json").read_text()))

    def set_route(**changes: Any) -> None:
        (tmp_path / "route.json").write_text(json.dumps(document() | changes))
        server.run("route", "set", "--file", str(tmp_path / "route.json"), "--model", model.name)

    def agreed() -> float:
        labels = {"route": model.name, "outcome": "agreed"}
        return server.triton_metric("nereid_route_shadow_requests_total", **labels)

    server.run("add", str(model.first), "--name", model.name, "--task", model.task, "--yes", *model.more)
    assert model.ask(address) == ("v1", model.words)
    with calling(server, model) as variants:
        # The machine that tests is busy, and this test is not about latency.
        gates = "--accept-change", "--max-slowdown", "1000"
        server.run("publish", model.name, str(model.second), *gates)
        (candidate,) = (variant["model"] for variant in document()["variants"] if variant["name"] == "v2")
        shadow = {"name": "next", "model": candidate, "version": 1, "percent": 100}
        set_route(shadows=[shadow], shadow_max_in_flight=16)
        wait_until(lambda: agreed() >= 3, "a shadow that agrees")
        set_route(shadows=[])
        server.run("route", "set", "v1=50", "v2=50", "--model", model.name)
        wait_until(lambda: variants["v2"] >= 3, "answers of the second version")
        assert model.ask(address, variant="v2") == ("v2", model.words)
        server.run("rollback", model.name)
        after, old = variants["v2"], variants["v1"]
        wait_until(lambda: variants["v1"] >= old + 5, "answers after the rollback")
        assert variants["v2"] <= after + 2
        server.run("retire", model.name, "2")
        (drop := tmp_path / "drop").mkdir()
        with watching(drop, server.environment, *gates) as watch:
            shutil.copy(model.third, drop / f"{model.name}@next.onnx")
            watch.wait(f"{model.name}@next.onnx: published as version 3 of ")
    dropped = model.ask(address, variant="v3")
    shown = json.loads(server.run("versions", model.name, "--json").stdout)
    server.run("retire", model.name, "3")
    removed = server.run("remove", model.name, "--yes").stdout

    assert dropped == ("v3", model.last_words)
    assert sorted(version["version"] for version in shown["versions"]) == [1, 3]
    assert [part for part in PARTS[model.task] if f"{part}: removed" not in removed] == []
    assert [path.name for path in repository.iterdir() if path.is_dir() and model.name in path.name] == []
