"""Recognisers of the user's own: added, published and removed, without a server."""

import json
import shutil
from pathlib import Path

import onnx
import pytest
from onnx import helper
from PIL import Image

from nereid.base.assets import PARCEL_LABEL, STATE, TEXT_REPOSITORY
from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.publish.add import AddRequest, add
from nereid.models.publish.examination import ExaminationLimits
from nereid.models.publish.network import versions
from nereid.models.publish.publisher import publish
from nereid.models.publish.remove import remove
from nereid.repository.check import check
from nereid.repository.repository_index import configs
from nereid.tasks.read.characters import Characters
from nereid.tasks.read.reading_settings import ReadingSettings
from tests.publishing import OTHER_ANSWERS, classifier, propose
from tests.recognisers import TestRecogniser, raw
from tests.tables import cases

pytestmark = pytest.mark.process
pytest.importorskip("cv2", reason="opencv is not installed: extra text")

FINDERS = ("text_detect", "text_direction")
# These tests compare text: other programs may take the cores meanwhile.
ANY_SPEED = ExaminationLimits(max_slowdown=100)
# Reads the characters of bright lines with confidence, and costs no time.
BRIGHT = TestRecogniser(has_softmax=True, classes=11, characters=tuple("abcdefghi"))


@pytest.fixture
def repository(tmp_path):
    return tmp_path / "models"


@pytest.fixture
def file(tmp_path):
    raw(tmp_path / "own.onnx")
    return tmp_path / "own.onnx"


@pytest.fixture
def tiny(tmp_path):
    onnx.save(TestRecogniser(has_softmax=True).build(), tmp_path / "tiny.onnx")
    return tmp_path / "tiny.onnx"


@pytest.fixture
def texts(repository):
    shutil.copytree(TEXT_REPOSITORY, repository, ignore=shutil.ignore_patterns(*STATE))
    return repository


def request(file, **more) -> AddRequest:
    return AddRequest(file, "own", **{"task": "read", **more})


def models(repository) -> set[str]:
    return {path.name for path in repository.iterdir() if path.is_dir()}


@pytest.mark.slow
def test_recogniser_is_known_by_its_characters(repository, file):
    add(repository, request(file, task="", instances=1, profiles=("cpu",)), None)

    for profile, networks in (("", "served"), ("cpu", "in_process")):
        document = configs(repository, profile)["own_v1"]
        config = ModelConfig.from_document(document, repository / "own_v1", 1)
        settings = config.settings(ReadingSettings)
        assert (settings.network, settings.detect, settings.networks) == ("own_network", FINDERS[0], networks)
        assert config.cpu_instances == 1


@cases(
    preprocessing=({"parameters": {"preset": "imagenet"}}, "no parameters of a preprocessing"),
    size=({"size": (48, 48)}, "no size, head or thresholds"),
    blank=({"images": (Path("blank.png"),)}, r"blank.png': expected lines of text, found none; fix: "),
    no_image=({"images": (Path(__file__),)}, "golden image '.*': invalid image"),
    preview=({"preview": Path("seen.png")}, "cannot preview whole images"),
    # Another encoding would give other characters without an error.
    not_UTF_8=({"labels": Path("gbk.txt")}, "--labels: expected text in UTF-8"),
)
def test_request_that_does_not_fit_is_refused(more, message, repository, file, monkeypatch):
    monkeypatch.chdir(repository.parent)
    Image.new("RGB", (640, 480), "white").save("blank.png")
    Path("gbk.txt").write_bytes("文\n字\n".encode("gbk"))

    with pytest.raises(OperationFailed, match=message):
        add(repository, request(file, **more), None)

    assert models(repository) == set()


@cases(
    name_of_a_finder=("text_detect", "", "'text_detect' is a model that finds text .*; fix: "),
    other_model=("own", "text_detect", "'text_detect' that does not find text: "),
    no_model=("own", "text_direction", "'text_direction' that does not find text: unable to .* fix: "),
)
def test_networks_that_find_text_keep_their_names(name, folder, message, repository, tiny):
    """A reader would run a network that does not find text, or replace the one of other readers."""
    if folder:
        (repository / folder).mkdir(parents=True)
    if folder == "text_detect":
        text = (TEXT_REPOSITORY / "text_direction" / "config.pbtxt").read_text()
        (repository / folder / "config.pbtxt").write_text(text.replace("text_direction", folder))

    with pytest.raises(WrongUsage, match=message):
        add(repository, AddRequest(tiny, name, task="read"), None)


def test_images_keep_their_lines(repository, tmp_path):
    onnx.save(BRIGHT.build(), bright := tmp_path / "bright.onnx")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(PARCEL_LABEL, tmp_path / folder / "label.jpg")
    Image.new("RGB", (640, 480), "white").save(tmp_path / "blank.png")
    first, second = (tmp_path / folder / "label.jpg" for folder in ("a", "b"))

    proposal = propose(repository, request(bright, images=(first, tmp_path / "blank.png", second, first)))

    assert list(proposal.results) == [str(first), "blank.png", str(second)]
    assert proposal.results[str(first)] == proposal.results[str(second)] != ()
    assert proposal.results["blank.png"] == ()
    assert proposal.measurements.notes == (
        "no text is read in blank.png; fix: --images with text as you read it",
    )


def test_recogniser_of_single_lines_is_refused(repository, tmp_path):
    """The reader sends lines in batches, so a line that changes others is an error before it is served."""
    model = TestRecogniser(has_softmax=True).build()
    (product,) = [node for node in model.graph.node if node.op_type == "MatMul"]
    index, product.input[0] = list(model.graph.node).index(product), "mixed"
    mean = helper.make_node("ReduceMean", ["colours"], ["mean"], axes=[0], keepdims=1)
    for node in (helper.make_node("Sub", ["colours", "mean"], ["mixed"]), mean):
        model.graph.node.insert(index, node)
    onnx.save(model, tmp_path / "own.onnx")

    with pytest.raises(WrongUsage, match="expected a network that reads several lines at a time"):
        add(repository, request(tmp_path / "own.onnx"), None)


def test_steps_first_that_the_file_does_not_show_are_refused(repository, tmp_path):
    onnx.save(TestRecogniser(has_softmax=True, output="T,B").build(), tmp_path / "own.onnx")

    with pytest.raises(
        OperationFailed, match=r"\[1,steps\] for one line, got \[\d+,1\], probably steps first"
    ):
        add(repository, request(tmp_path / "own.onnx"), None)


@pytest.mark.nightly(minutes=1)
def test_next_version_is_changed_and_compared_by_its_text(repository, file, tmp_path):
    add(repository, request(file), None)
    characters = raw(tmp_path / "bare.onnx", characters=())
    raw(tmp_path / "other.onnx", characters=characters[::-1])

    done = publish(repository, "own", tmp_path / "bare.onnx", None, ANY_SPEED)

    assert (done.version, done.pinned, done.report.difference) == (2, ("own_v2",), 0)
    assert any("characters are written" in text for text in versions(repository, "own", None)[1][0].changes)
    assert len(Characters.from_file(repository / "own_network" / "2" / "model.onnx")) == len(characters) + 2
    assert [finding for finding in check(repository) if finding.verdict != "ok"] == []
    message = r"text of parcel_label\.jpg: expected at most 0\.05 .*: 'NEREID PARCEL' before, .*-change"
    with pytest.raises(OperationFailed, match=message):
        publish(repository, "own", tmp_path / "other.onnx", None, ANY_SPEED)
    assert publish(repository, "own", tmp_path / "other.onnx", None, OTHER_ANSWERS).report.difference > 0.5


@pytest.mark.slow
def test_default_reader_takes_a_recogniser_as_it_is_exported(texts, file):
    """No description says how version 1 was changed: a recogniser has only one form. The deadline stays."""
    done = publish(texts, "read_text", file, None, ANY_SPEED)

    assert (done.model, done.pinned) == ("text_recognise", ("read_text_v2", "read_waybill_v2"))
    route = json.loads((texts / "read_text.route.json").read_text())
    assert [variant["deadline_ms"] for variant in route["variants"]] == [30_000, 30_000]
    assert [finding for finding in check(texts) if finding.verdict == "fail"] == []


def test_networks_that_find_text_are_shared(texts, tiny):
    before = models(texts)

    proposal = propose(texts, request(tiny))
    add(texts, request(tiny, is_replacing=True), None)

    assert proposal.shared == FINDERS
    assert proposal.models == ("own_network", "own_v1")
    assert remove(texts, "own", None) == ("own_network", "own_v1", "own")
    assert models(texts) == before
    assert remove(texts, "read_text", None) == ("read_text_v1", "read_text")
    removed = (*FINDERS, "text_recognise", "read_waybill_v1", "read_waybill")
    assert remove(texts, "read_waybill", None) == removed
    assert models(texts) == set()


def test_newest_network_that_finds_text_is_used(texts, tiny):
    publish(texts, "text_detect", texts / "text_detect" / "1" / "model.onnx", None, ANY_SPEED)

    add(texts, request(tiny), None)

    settings = ModelConfig.from_file(texts / "own_v1", 1).settings(ReadingSettings)
    finders = {"detect": ("text_detect", 2), "direction": ("text_direction", 1)}
    assert settings.parts == finders | {"network": ("own_network", 1)}
    assert [finding for finding in check(texts) if finding.verdict == "fail"] == []


def test_only_reader_is_replaced_and_removed(repository, tiny):
    add(repository, request(tiny), None)
    assert json.loads((repository / "own.route.json").read_text())["variants"][0]["deadline_ms"] == 30_000
    add(repository, request(tiny, is_replacing=True), None)

    assert [finding for finding in check(repository) if finding.verdict != "ok"] == []
    assert remove(repository, "own", None) == (*FINDERS, "own_network", "own_v1", "own")
    assert models(repository) == set()


def test_metadata_alone_do_not_make_a_recogniser(repository, tmp_path):
    model = classifier()
    model.metadata_props.add(key="character", value="a")
    onnx.save(model, tmp_path / "own.onnx")

    proposal = propose(repository, request(tmp_path / "own.onnx", task="", parameters={"preset": "imagenet"}))

    assert proposal.importer.name == "classify"
