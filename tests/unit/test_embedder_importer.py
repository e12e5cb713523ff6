"""Networks of embeddings in `nereid add` and `nereid publish`, without a server."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from nereid.base.assets import SAMPLES
from nereid.base.config.model_config import ModelConfig
from nereid.base.contract import EMBEDDING, SCORES
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.cli.models.add import summary_lines
from nereid.models.publish.add import AddRequest, add
from nereid.models.publish.examination import ExaminationLimits
from nereid.models.publish.publisher import publish
from nereid.repository.check import check
from nereid.tasks.embed.examination import are_embeddings
from tests import embedders
from tests.embedders import DIMS, SIDE, UNIT, add_embedder, convolutional, embeddings, small
from tests.networks import run
from tests.publishing import propose
from tests.tables import cases

pytestmark = pytest.mark.process
LENGTH = "output 'output' is scaled to the length 1, as 'embedding'"


def request(path, made: onnx.ModelProto, **more) -> AddRequest:
    onnx.save(made, path / "new.onnx")
    return AddRequest(path / "new.onnx", "faces", {"preset": "imagenet"}, **more)


def outputs_of(repository) -> list[str]:
    return [tensor.name for tensor in ModelConfig.from_file(repository / "faces_v1", 1).outputs]


@pytest.mark.parametrize("tail", UNIT)
def test_vectors_of_length_1_are_recognised(tmp_path, tail):
    """Nothing is changed in such a network, and the summary shows the cosine of both photos."""
    plan = propose(tmp_path / "models", request(tmp_path, convolutional(UNIT[tail])))

    assert (plan.importer.name, outputs_of(tmp_path / "models")) == ("embed", [EMBEDDING])
    assert plan.about == [("embedding", f"{DIMS} dimensions, length 1")]
    assert [*plan.changes] == []
    assert "labels" not in "\n".join(summary_lines("faces", plan))
    one, other = (plan.results[path.name] for path in SAMPLES)
    assert one[0]["image"] == SAMPLES[1].name
    assert one[0]["cosine"] == other[0]["cosine"]
    assert [finding for finding in check(tmp_path / "models") if finding.verdict != "ok"] == []


def test_progress_is_reported_once_if_the_task_changes(tmp_path):
    lines: list[str] = []
    made = request(tmp_path, convolutional(UNIT["torch"]), preview=tmp_path / "preview.png")

    add(tmp_path / "models", made, None, lines.append)

    assert "note: this is a network of task 'embed'; fix: --task classify if it is not" in lines
    assert [line for line, count in Counter(lines).items() if count > 1] == []


def test_one_photo_is_enough(tmp_path):
    plan = propose(tmp_path / "models", request(tmp_path, convolutional(UNIT["torch"]), images=SAMPLES[:1]))

    assert (plan.importer.name, plan.results) == ("embed", {SAMPLES[0].name: ()})


def test_photos_of_one_name_are_told_apart_by_their_paths(tmp_path):
    images = [tmp_path / folder / "a.jpg" for folder in ("day", "night")]
    for image, sample in zip(images, SAMPLES, strict=True):
        image.parent.mkdir()
        shutil.copy(sample, image)

    plan = propose(tmp_path / "models", request(tmp_path, convolutional(UNIT["torch"]), images=(*images,)))

    others = {name: [other["image"] for other in cosines] for name, cosines in plan.results.items()}
    day, night = map(str, images)
    assert others == {day: [night], night: [day]}


@cases(
    "tail, more, metadata",
    **{tail: (nodes, {}, {}) for tail, nodes in embedders.SCORES.items()},
    names_in_the_file=(UNIT["torch"], {}, {"names": json.dumps([f"class {n}" for n in range(DIMS)])}),
    task_in_the_file=(UNIT["torch"], {}, {"task": "classify"}),
    task=(UNIT["torch"], {"task": "classify"}, {}),
    activation=(UNIT["torch"], {"activation": "none"}, {}),
)
def test_scores_are_never_taken_for_embeddings(tmp_path, tail, more, metadata):
    """What the user or the file says outweighs the numbers."""
    plan = propose(tmp_path / "models", request(tmp_path, convolutional(tail, **metadata), **more))

    assert (plan.importer.name, outputs_of(tmp_path / "models")) == ("classify", [SCORES])


@cases("more, metadata", task=({"task": "embed"}, {}), metadata=({}, {"task": "embed"}))
def test_other_vectors_are_scaled(tmp_path, more, metadata):
    plan = propose(tmp_path / "models", request(tmp_path, convolutional(**metadata), **more))

    inputs = {"image": np.random.default_rng(0).random((3, 3, SIDE, SIDE), np.float32)}
    (rows,) = run(tmp_path / "models" / "faces_network" / "1" / "model.onnx", inputs).values()
    expected = run(tmp_path / "new.onnx", inputs)["output"].astype(np.float64)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(rows, expected, atol=1e-6)  # FP32
    assert (plan.importer.name, [*plan.changes]) == ("embed", [LENGTH])
    assert plan.about == [("embedding", f"{DIMS} dimensions, length 1")]


def test_vectors_stay_as_they_are_without_an_activation(tmp_path):
    plan = propose(tmp_path / "models", request(tmp_path, convolutional(), task="embed", activation="none"))

    assert (plan.about, [*plan.changes]) == ([("embedding", f"{DIMS} dimensions")], [])


@cases(
    "more, message",
    activation=({"activation": "softmax"}, "cannot append a softmax: an embedding has no classes"),
    labels=({"labels": Path(__file__)}, "an embedding has no classes; fix: leave out --labels"),
)
def test_options_for_classes_are_refused(tmp_path, more, message):
    with pytest.raises(WrongUsage, match=re.escape(message)):
        propose(tmp_path / "models", request(tmp_path, convolutional(), task="embed", **more))


@cases(
    "rows, expected",
    in_any_direction=([[0.6, -0.8], [-0.8, 0.6]], True),
    one_is_longer=([[0.6, -0.8], [-0.8, 0.7]], False),
    one_component=([[1.0, 0.0], [0.0, 1.0]], False),
)
def test_evidence_is_the_length_of_every_vector(rows, expected):
    assert are_embeddings([{"output": np.array([row], np.float32)} for row in rows]) is expected


GATES = ExaminationLimits(max_slowdown=1000)


def test_next_version_is_compared_by_its_angle(tmp_path):
    """Noise in the weights turns the vectors a little; other weights turn them far away."""
    repository, image = add_embedder(tmp_path), small(SAMPLES[0])
    near, far = convolutional(noise=0.02), convolutional(seed=2)
    for name, made in (("near", near), ("far", far)):
        onnx.save(made, tmp_path / f"{name}.onnx")

    with pytest.raises(OperationFailed, match=re.escape("a cosine of at least 0.9 with the current")):
        publish(repository, "faces", tmp_path / "far.onnx", None, limits=GATES)
    done = publish(repository, "faces", tmp_path / "near.onnx", None, limits=GATES)

    (old,), (new,) = embeddings(convolutional(), image), embeddings(near, image)
    assert 0 < (1 - old @ new) / 2 < 0.01
    assert done.report.difference < 0.05
    description = json.loads((repository / "faces_network" / "2" / "description.json").read_text())
    assert (description["task"], description["changes"]) == ("embed", [LENGTH])


def test_next_version_may_need_what_the_current_one_has_inside(tmp_path):
    """Vectors of any length are scaled, and keep the name of the output whose vectors have the length 1."""
    repository = add_embedder(tmp_path, made=convolutional(UNIT["torch"]))
    onnx.save(convolutional(noise=0.02), tmp_path / "next.onnx")

    publish(repository, "faces", tmp_path / "next.onnx", None, limits=GATES)

    served = onnx.load(repository / "faces_network" / "2" / "model.onnx")
    assert [output.name for output in served.graph.output] == ["output"]
