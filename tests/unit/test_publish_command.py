"""Commands that change the models of a repository: output, progress and exit codes."""

import json
import os
import sys

import onnx
import pytest

from tests.commands import captured
from tests.publishing import NET, candidate, classifier, contents, unchanged
from tests.tables import cases

pytestmark = pytest.mark.process
DONE = (0, "net 2: in the repository (no server running)")


def test_version_is_published_listed_rolled_back_and_retired(nereid, tmp_path):
    words = ("--accept-change", "--max-slowdown", 100, "--share", "10%")
    done = nereid("publish", NET, candidate(tmp_path, 2), *words)
    assert (done.exit_code, done.stdout.split(" as ")[0]) == DONE
    assert "adds-2.onnx: staged as version 2 of 'net'\n" in done.stderr

    listed = json.loads(nereid("versions", "--json", "--model=r").stdout)
    assert [(entry["version"], entry["shares"]) for entry in listed["versions"]] == [
        (2, {"r": pytest.approx(0.1)}),
        (1, {"r": pytest.approx(0.9)}),
    ]
    assert "adds-2.onnx" in nereid("versions", "r").stdout

    rolled = nereid("rollback", NET)
    said = "r: generation 2, v1 100 %, v2 0 %, written without a server\n"
    assert (rolled.exit_code, rolled.stdout) == (0, said)
    assert nereid("retire", NET, 2).stdout == "net 2: retired\n"


def test_version_is_converted_to_fp16(nereid, tmp_path):
    words = ("publish", NET, candidate(tmp_path, 1), "--max-slowdown", 100, "--precision")

    assert nereid(*words, "int8").exit_code == 2
    done = nereid(*words, "fp16")

    assert (done.exit_code, done.stdout.split(" as ")[0]) == DONE
    assert "are converted to FP16, inputs and outputs stay FP32\n" in done.stderr


def test_network_is_added(nereid, tmp_path):
    before = contents(tmp_path / "models")
    onnx.save(classifier(), tmp_path / "new.onnx")

    words = ("add", tmp_path / "new.onnx", "--name", "small", "--preset", "imagenet", "--profile", "cpu")
    document = json.loads(nereid(*words, "--json").stdout)
    assert (document["labels"], document["can_batch"]) == ({"count": 0, "from": ""}, True)
    assert document["parameters"] == {"preset": "imagenet", "resize_shorter_px": "37"}
    assert document["form"].keys() == {"image", "outputs", "is_channels_last", "is_grey", "classes", "head"}
    assert contents(tmp_path / "models").keys() == before.keys()

    done = nereid(*words, "--yes")

    assert (done.exit_code, done.stdout.split(",")[0]) == (0, "small: in the repository (no server running)")
    assert "change         a softmax is appended to output 'logits', as 'probabilities'" in done.stderr

    (version,) = json.loads(nereid("versions", "small", "--json").stdout)["versions"]
    assert version["changes"] == ["a softmax is appended to output 'logits', as 'probabilities'"]


@cases(
    empty=(("publish", NET, "{bad}"), 1, "is empty (0 bytes)"),
    no_file=(("publish", NET, "nowhere.onnx"), 2, "'nowhere.onnx' does not exist"),
    no_model=(("publish", "other", "{bad}"), 2, "has no network 'other', it has: net"),
    bad_name=(("add", "{bad}", "--name", "a b", "--yes"), 2, "invalid name: expected at most 51 "),
    no_way_back=(("rollback", NET), 2, "has no version of 'net' before 1"),
    no_version=(("retire", NET, 5), 2, "version 5 of 'net': it does not exist, the versions are: 1"),
)
def test_failure_has_its_reason_and_changes_nothing(words, status, reason, nereid, tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"")

    with unchanged(tmp_path / "models"):
        done = nereid(*(str(word).replace("{bad}", str(tmp_path / "bad.onnx")) for word in words))

    assert (done.exit_code, done.stdout) == (status, "")
    assert reason in done.stderr


def test_question_on_a_terminal(tmp_path):
    onnx.save(classifier(), tmp_path / "new.onnx")
    ours, theirs = os.openpty()
    words = ("add", tmp_path / "new.onnx", "--name", "small", "--preset", "imagenet")
    command = [sys.executable, "-m", "nereid", *map(str, words)]
    environment = os.environ | {"NEREID_REPOSITORY": str(tmp_path / "own")}
    os.write(ours, b"n\n")
    done = captured(command, stdin=theirs, env=environment, timeout=120)
    os.close(ours)
    os.close(theirs)

    assert done.returncode == 0
    screen, question, rest = done.stderr.partition("Add it?")
    assert "scores         5 classes, probabilities" in screen
    assert question
    assert "'small' was not added; nothing has changed" in rest
    assert not (tmp_path / "own" / "small").exists()
