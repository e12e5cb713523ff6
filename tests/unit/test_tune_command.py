"""`nereid tune` without a server: wrong usage, exit codes, and the requests and configs that it makes."""

import importlib.util
import json
import os
import shlex
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nereid.base.assets import COFFEE, PARCEL_LABEL, REPOSITORY
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.cli.main import app
from nereid.cli.models import tune as command
from nereid.insight.tune import photos, profiles, tuning
from nereid.insight.tune.load_generator import LoadResult
from nereid.insight.tune.search import CURRENT_CONFIG, FinalComparison, Objective
from nereid.insight.tune.trial import OPEN_SIDE_PX, TrialServer, copy_repository, request_bodies
from nereid.insight.tune.tuning import TuneOptions, TuneReport
from nereid.repository.pbtxt import parse
from tests.tables import cases


@cases(
    unknown=(["nosuch"], "has no model 'nosuch', it has: classify, classify_v1, classify_v2"),
    route=(["classify"], "it is a route; fix: tune its variants: classify_v1, classify_v2"),
    profile=(["classify_v1", "--profile", "nosuch"], "no model has the profile 'nosuch', expected one of: "),
    ensemble=(["classify_v1", "--profile", "ensemble"], "tune its steps: imagenet_preprocess, effi"),
    concurrency=(["classify_v1", "--concurrency", "8,0"], "expected whole numbers from 1, got '0'"),
    inf_minutes=(["classify_v1", "--minutes", "inf"], "expected a finite number, got inf"),
    minutes=(["classify_v1", "--minutes", "-1"], "greater than or equal to"),
)
def test_wrong_usage_is_rejected(words, reason):
    environment = {"NEREID_REPOSITORY": str(REPOSITORY), "COLUMNS": "200"}

    done = CliRunner().invoke(app, ["tune", *words], env=environment)

    assert (done.exit_code, done.stdout) == (2, "")
    assert reason in done.stderr


def test_missing_package_is_named(monkeypatch):
    finder = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvloop" else finder(name))

    with pytest.raises(OperationFailed, match=r"needs uvloop; fix: pip install 'nereid-serving\[load\]'"):
        command.run_tuning(TuneOptions(REPOSITORY, "classify_v1", "cpu"), {}, False)


def test_command_line_is_read_as_the_same_options(monkeypatch):
    images, objective = (COFFEE, Path("a cat.jpg")), Objective("latency", 12.5)
    options = TuneOptions(REPOSITORY, "classify_v1", "cpu", objective, 2.5, (4, 1), images, 7)
    read = []
    monkeypatch.setattr(command, "run_tuning", lambda options, *_: read.append(options))

    done = CliRunner().invoke(app, shlex.split(options.command)[1:])

    assert (done.exit_code, [replace(entry, images=tuple(entry.images)) for entry in read]) == (0, [options])


@pytest.mark.parametrize("as_json", [True, False])
def test_measurements_are_printed_even_if_the_write_fails(tmp_path, monkeypatch, capsys, as_json):
    """A concurrent change of the config does not lose minutes of measurements."""
    models = copy_repository(REPOSITORY, tmp_path / "models")

    def changing(*args):
        (models / "classify_v1" / "configs" / "cpu.pbtxt").write_text("")
        slow, fast = ([{1: LoadResult(rate, 5.0, 5.0, 5.0, 9, 0)}] * 3 for rate in (10.0, 20.0))
        default, best = (("instances", 2),), (("instances", 3),)
        seen = {CURRENT_CONFIG: slow[0], best: fast[0]}
        final = FinalComparison(slow, slow, fast)
        return TuneReport("classify_v1", Objective("throughput"), default, best, final, seen, {})

    monkeypatch.setattr(tuning, "run_search", changing)

    with pytest.raises(OperationFailed, match="has changed during the search"):
        command.run_tuning(TuneOptions(models, "classify_v1", "cpu"), {}, as_json)

    printed = capsys.readouterr().out
    if as_json:
        assert json.loads(printed)["written"] == []
    assert ("images" if as_json else "p99 ms") in printed


def test_read_only_folder_is_rejected_before_the_search(tmp_path, monkeypatch):
    models = copy_repository(REPOSITORY, tmp_path / "models")
    monkeypatch.setattr(os, "access", lambda path, mode: "classify_v2" not in str(path))
    monkeypatch.setattr(tuning, "run_search", lambda *args: pytest.fail("it was measured"))

    with pytest.raises(OperationFailed, match=r"cannot write to '.*classify_v2/configs'; fix: --dry-run"):
        command.run_tuning(TuneOptions(models, "classify_v1", "cpu"), {}, False)


def test_sigterm_cleans_up_like_ctrl_c(tmp_path, monkeypatch):
    models = copy_repository(REPOSITORY, tmp_path / "models")
    is_closed = []

    def killed(*args):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        finally:
            is_closed.append(True)

    monkeypatch.setattr(tuning, "run_search", killed)

    with pytest.raises(SystemExit) as ended:
        command.run_tuning(TuneOptions(models, "classify_v1", "cpu", is_dry=True), {}, False)

    assert (ended.value.code, is_closed) == (128 + signal.SIGTERM, [True])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


PHOTOS = [b"one photo", b"another"]


@cases(
    fixed_picture=([3, 48, 192], 8, [1, 3, 48, 192]),
    open_width=([3, 48, -1], 8, [1, 3, 48, OPEN_SIDE_PX]),
    open_sides_without_a_batch=([3, -1, -1], 0, [3, OPEN_SIDE_PX, OPEN_SIDE_PX]),
    tokens=([-1], 8, [1, 1]),
)
def test_tensors_have_the_shapes_of_the_config(dims, batch, shape):
    """Sides that the config leaves open are those of a picture, because networks cannot take one pixel."""
    config = f'max_batch_size: {batch} input {{ name: "x" data_type: TYPE_FP32 dims: {dims} }}'

    ((body, headers),) = request_bodies(parse(config), PHOTOS)
    head = json.loads(body[: int(headers["Inference-Header-Content-Length"])])
    assert {tensor["name"]: tensor["shape"] for tensor in head["inputs"]} == {"x": shape}


def test_other_text_is_refused():
    with pytest.raises(WrongUsage, match="expected an input of images or numbers, got 'words' STRING"):
        request_bodies(parse('input { name: "words" data_type: TYPE_STRING dims: [ 1 ] }'), PHOTOS)


def test_reader_gets_a_page_with_text():
    """On a photo without text, a reader would not run its recogniser."""
    assert photos.sample(["text", "confidence", "box"]) == PARCEL_LABEL.read_bytes()
    assert photos.sample(["box", "score", "label"]) == photos.jpeg((640, 427)) == photos.sample(["scores"])


def test_steps_have_their_configs_of_the_profile(tmp_path):
    repository = shutil.copytree(REPOSITORY, tmp_path / "models")
    on_gpu = (repository / "efficientnet_lite0" / "configs" / "gpu.pbtxt").read_text()
    (tmp_path / "trial").mkdir()
    tuned = profiles.tunable(repository, "classify_v1", "gpu")

    TrialServer(repository, tuned, (), (1,), tmp_path / "trial", os.environ)

    served = tmp_path / "trial" / "models" / "efficientnet_lite0" / "configs" / "tuned.pbtxt"
    assert served.read_text().endswith(on_gpu)
    assert not [*repository.rglob("tuned.pbtxt")]
