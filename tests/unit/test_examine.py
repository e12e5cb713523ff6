"""Networks that the examination rejects, and crashes of the examiner process."""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from nereid.base.assets import CHELSEA, COFFEE, REPOSITORY
from nereid.base.errors import InvalidConfig, OperationFailed
from nereid.models.publish import examination, examiner, isolated_child
from nereid.models.publish.examination import (
    ExaminationLimits,
    ExaminationRequest,
    Measurements,
    Rejected,
    examine,
)
from nereid.models.publish.examiner import check_headroom, check_memory, is_slower
from nereid.repository.onnx_file import InvalidOnnx
from nereid.tasks.classify.examination import difference
from tests.networks import DATATYPES, OPSET, identity, move_out, written
from tests.routes import wait_until
from tests.tables import cases

pytestmark = pytest.mark.process
IMAGE, SCORES = "float[N,3,8,8] x", "float[N,4] scores"
PREPROCESS = """name: "pre" backend: "preprocess" max_batch_size: 8
input { name: "image" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "x" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }
parameters { key: "preset" value { string_value: "efficientnet_lite" } }
"""
LABELS = REPOSITORY / "classify" / "labels.txt"  # 1000 of them
LIMITS = {"images": (), "tolerance": 0.01, "max_slowdown": 1e9}


def weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((192, 4)).astype(np.float32)


def classifier(
    matrix: np.ndarray | None = None,
    more: str = "scores = Identity (sound)",
    inputs: str = IMAGE,
    outputs: str = SCORES,
    opset: int = OPSET,
    **initializers: np.ndarray,
) -> onnx.ModelProto:
    """Build four scores of an image, `sound`; the operators `more` make the output from them."""
    nodes = f"pixels = Flatten (x) logits = MatMul (pixels, w) sound = Softmax (logits) {more}"
    initializers["w"] = weights() if matrix is None else matrix
    return written(f"({inputs}) => ({outputs}) {{ {nodes} }}", opset, **initializers)


def config(**changes) -> dict:
    image = {"name": "x", "data_type": "TYPE_FP32", "dims": ["3", "8", "8"]}
    scores = {"name": "scores", "data_type": "TYPE_FP32", "dims": ["4"], "label_filename": "labels.txt"}
    return {"name": "net", "max_batch_size": 8, "input": [image], "output": [scores], **changes}


@pytest.fixture
def make_request(tmp_path):
    """Build requests for a network, or bytes in the place of one, instead of `classifier()`."""

    def question(candidate: onnx.ModelProto | bytes, **changes) -> ExaminationRequest:
        for folder, content in (("1", classifier()), ("incoming", candidate)):
            (tmp_path / "net" / folder).mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, bytes) else content.SerializeToString()
            (tmp_path / "net" / folder / "model.onnx").write_bytes(text)
        (tmp_path / "labels.txt").write_text("a\nb\nc\nd\n")
        request = ExaminationRequest(
            model="net",
            version_folder=tmp_path / "net" / "incoming",
            document=config(),
            current=tmp_path / "net" / "1",
            preprocess_version=1,
            labels=tmp_path / "labels.txt",
        )
        changed = {field.name for field in fields(ExaminationLimits)} & changes.keys()
        limits = ExaminationLimits(**LIMITS | {name: changes.pop(name) for name in changed})
        return replace(request, limits=limits, **changes)

    return question


def examined(request: ExaminationRequest) -> Measurements:
    return examiner.examine_step_by_step(request, lambda line: None)


@pytest.fixture
def preprocess(tmp_path) -> Path:
    (tmp_path / "pre" / "1").mkdir(parents=True)
    (tmp_path / "pre" / "config.pbtxt").write_text(PREPROCESS)
    return tmp_path / "pre"


def circular() -> onnx.ModelProto:
    model = classifier()
    model.graph.node[0].input[0] = model.graph.node[-1].output[0]
    return model


def external(location: str) -> onnx.ModelProto:
    model = classifier()
    move_out(model.graph.initializer[0], location)
    return model


def spoiled(matrix: np.ndarray, *positions: tuple[int, int]) -> np.ndarray:
    matrix = matrix.copy()
    for position in positions:
        matrix[position] = np.nan
    return matrix


def slow() -> onnx.ModelProto:
    square = " ".join(f"h{i + 1} = MatMul (h{i}, square)" for i in range(12))
    more = f"h0 = MatMul (sound, wide) {square} nothing = MatMul (h12, tall) scores = Add (sound, nothing)"
    shapes = {"wide": (4, 1024), "square": (1024, 1024), "tall": (1024, 4)}
    return classifier(more=more, **{name: np.zeros(shape, np.float32) for name, shape in shapes.items()})


def large() -> onnx.ModelProto:
    more = """
        top = ReduceMax <keepdims = 1> (sound)
        filled = Expand (top, many)
        least = ReduceMin <keepdims = 0> (filled)
        nothing = Mul (least, zero)
        scores = Add (sound, nothing)"""
    return classifier(more=more, many=np.int64([25, 2**20]), zero=np.float32([0]))


def crop(size: int) -> onnx.ModelProto:
    return classifier(np.zeros((3 * size * size, 4), np.float32), inputs=f"float[N,3,{size},{size}] x")


BAD = {
    "zero-bytes": (b"", {}, r"is empty \(0 bytes\)"),
    "external-missing": (external("w.bin"), {}, "which is missing"),
    "opset": (classifier(opset=27), {}, "opset at most .* the container 26.08 .*, got 27"),
    "checker": (circular(), {}, "the ONNX checker refuses 'model.onnx': .* topologically sorted"),
    "no-labels": (classifier(), {"labels": Path("/none")}, "cannot read label file '/none': .*No such file"),
    "labels": (classifier(), {"labels": LABELS}, "expected 4 labels for .* 'scores', got 1000"),
    "nan": (classifier(spoiled(weights(), (1, 1), (5, 0))), {}, "'w': expected numbers, got NaN in 2 of 768"),
    "input-shape": (crop(9), {}, r"input 'x': expected FP32 \[-1,3,8,8\], got FP32 \[-1,3,9,9\]$"),
    "output-name": (
        classifier(more="raw = Identity (sound)", outputs="float[N,4] raw"),
        {},
        "'scores': expected .*, got none; unexpected output 'raw'",
    ),
    "extra-input": (
        classifier(more="scores = Mul (sound, mask)", inputs=f"{IMAGE}, float[N,4] mask"),
        {},
        r"^unexpected input 'mask' FP32 \[-1,4\]$",
    ),
    "config": (crop(9), {"current": None}, r"expected shape \[-1,3,9,9\] .*; fix: dims: \[3,9,9\]"),
    "not-finite": (
        classifier(more="negative = Sub (sound, two) scores = Log (negative)", two=np.float32([2])),
        {},
        "'scores' on random input 1: expected finite .* in 4 of 4 values",
    ),
    "other-answers": (
        classifier(weights(seed=1)),
        {},
        r"\'scores\' on random input 3: .* at most 0.01 .*; fix: .*--accept",
    ),
    "slower": (slow(), {"max_slowdown": 1.5}, "too slow: expected at most 1.5 times .* ms for one row, got "),
    "larger": (large(), {}, "too much memory: expected at most 1.5 times .* MB and 64 MB more, got "),
}


@cases(("candidate", "changes", "reason"), **BAD)
def test_bad_network_is_rejected_with_its_reason(make_request, candidate, changes, reason):
    with pytest.raises((Rejected, InvalidOnnx, InvalidConfig), match=reason):
        examined(make_request(candidate, **changes))


def test_external_weights_are_checked(make_request):
    question = make_request(external("w.bin"))
    (question.version_folder / "w.bin").write_bytes(spoiled(weights(), (191, 2)).tobytes())

    with pytest.raises(Rejected, match=r"'w': .* NaN in 1 of 768"):
        examined(question)


def test_nan_in_a_constant_is_found_infinity_is_not_refused(make_request):
    """Weights may be constants; a mask of -inf is valid."""
    more = "low = Constant <value = float[1] mask {%s}> () scores = Max (sound, low)"

    assert examined(make_request(classifier(more=more % "-inf"))).difference == 0
    with pytest.raises(Rejected, match="weight 'mask': expected numbers, got NaN in 1 of 1 values"):
        examined(make_request(classifier(more=more % "nan")))


def test_accepted_difference_is_noted(make_request):
    report = examined(make_request(classifier(weights(seed=1)), is_change_accepted=True))

    assert report.difference > 0.01
    assert [note.split(":")[0] for note in report.notes] == ["accepted difference"]


def test_first_version_is_compared_with_nothing(make_request):
    report = examined(make_request(classifier(), current=None))

    assert (report.slowdown, report.memory_ratio, report.difference) == (None, None, None)
    assert report.latency_ms > 0
    assert (report.opset, report.ir_version, report.notes) == (17, 8, ())


def test_scores_that_are_not_probabilities_are_noted(make_request):
    model = classifier(more="scores = Mul (sound, three)", three=np.float32([3]))

    assert examined(make_request(model, current=None)).notes == (
        "output 'scores' does not contain probabilities: expected sum 1, got 3; "
        "fix: append a softmax with nereid add --activation softmax",
    )


def test_instances_on_a_gpu_are_noted(make_request):
    document = config(instance_group=[{"kind": "KIND_GPU", "count": 1}])

    notes = examined(make_request(classifier(), document=document)).notes

    assert notes == ("its instances run on a GPU, but it was examined on the CPU",)


@pytest.mark.parametrize("datatype", sorted(set(DATATYPES) - {"FP32"}))
def test_every_datatype_gets_inputs(make_request, datatype):
    model = identity(datatype, ["N", 2, None])

    assert examined(make_request(model, current=None, document={"name": "net"}, labels=None)).latency_ms > 0


def test_outputs_are_compared_on_the_golden_images(make_request, preprocess):
    golden = {"preprocess": preprocess, "images": (CHELSEA, COFFEE), "tolerance": 0.001}

    with pytest.raises(Rejected, match=r"output 'scores' on coffee\.jpg: expected a difference"):
        examined(make_request(classifier(weights(seed=1)), **golden))


def test_preprocess_of_other_tensors_is_refused(make_request, preprocess):
    file = preprocess / "config.pbtxt"
    file.write_text(file.read_text().replace("[ 3, 8, 8 ]", "[ 3, 9, 9 ]"))

    message = r"'pre' returns TYPE_FP32 \[3, 9, 9\], but .* inputs are 'x' TYPE_FP32"
    with pytest.raises(Rejected, match=message):
        examined(make_request(classifier(), preprocess=preprocess, images=(COFFEE,)))


WORDS = np.array([b"cat", b"dog"], object)


@cases(
    quarter_of_the_largest=([1.0, -4.0], [2.0, -4.0], 0.25),
    zeros=([0.0], [0.0], 0.0),
    from_zero=([0.0], [1e-9], np.inf),
    shape=([1.0], [1.0, 1.0], np.inf),
    empty=([], [], 0.0),
    bool=([True, False], [True, True], 1.0),
    same_words=(WORDS, WORDS.copy(), 0.0),
    other_words=(WORDS, WORDS[::-1], np.inf),
)
def test_difference_is_relative_to_the_largest_value(before, after, expected):
    assert difference(np.array(before), np.array(after)) == expected


def test_slower_is_a_ratio_beyond_noise():
    assert [is_slower(after_ms, 2.0, 1.5) for after_ms in (2.9, 3.1)] == [False, True]
    assert [is_slower(after_ms, 0.15, 1.5) for after_ms in (0.3, 0.36)] == [False, True]


def test_memory_is_a_ratio_and_64_mb_and_needed_for_all_instances():
    assert check_memory(60 * 2**20, 2**20, 1.5) == 60
    assert check_memory(2**20, 0, 1.5) is None
    with pytest.raises(Rejected, match=r"at most 1\.5 times .* 500 MB and 64 MB more, got 1,000 MB"):
        check_memory(1000 * 2**20, 500 * 2**20, 1.5)
    check_headroom(100 * 2**20, 2, 240 * 2**20)
    with pytest.raises(Rejected, match=r"360 MB \(3 instances of 100 MB, and 20% more\), got 240 MB"):
        check_headroom(100 * 2**20, 3, 240 * 2**20)


def test_unexpected_error_is_a_rejection(make_request):
    """Only the network differs between examinations, so it has caused the error."""
    question = make_request(classifier(), document=config(output=[{"data_type": "TYPE_FP32", "dims": ["4"]}]))

    with pytest.raises(Rejected, match=r"^the examination failed unexpectedly: KeyError: 'name'$"):
        examine(question)


def parents() -> dict[int, int]:
    processes = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            processes |= {int(path.parent.name): int(parent)} if state != "Z" else {}
    return processes


def children(process: int) -> set[int]:
    return {child for child, parent in parents().items() if parent == process}


@pytest.fixture
def pipe(tmp_path) -> Path:
    """Make a pipe, at which a reader of labels waits."""
    os.mkfifo(path := tmp_path / "pipe")
    return path


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL], ids=lambda number: number.name)
def test_crash_of_the_process_is_a_rejection(make_request, pipe, number):
    before = children(os.getpid())

    def kill(line: str) -> None:
        if line.startswith("opening"):
            (child,) = children(os.getpid()) - before
            os.kill(child, number)

    with pytest.raises(Rejected, match=f"'net' crashed with {number.name}.*, last step: opening it"):
        examine(make_request(classifier(), labels=pipe), progress=kill)


def test_examination_that_hangs_is_ended(make_request, pipe, monkeypatch):
    monkeypatch.setattr(examination, "TIMEOUT_S", 2.5)
    monkeypatch.setattr(examination, "BYTES_PER_S", 2**20)
    request = make_request(classifier(), labels=pipe)
    (request.version_folder / "weights").write_bytes(bytes(2**20))
    before = children(os.getpid())

    with pytest.raises(Rejected, match=r"'net' was stopped: expected a result within 3\.5 s, last step: "):
        examine(request)

    assert children(os.getpid()) <= before


def test_killed_command_ends_its_examiner(make_request, pipe, tmp_path):
    (tmp_path / "question").write_bytes(make_request(classifier(), labels=pipe).to_json())
    program = (
        "import sys; from nereid.models.publish.examination import *\n"
        "request = ExaminationRequest.from_json(open(sys.argv[1]).read())\n"
        "examine(request, progress=lambda line: print(line, flush=True))"
    )

    words = [sys.executable, "-c", program, tmp_path / "question"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as command:
        for line in command.stdout:
            if line.startswith("opening"):
                break
        (examining,) = children(command.pid)
        command.kill()

    wait_until(lambda: examining not in parents(), "the end of the examiner")


@cases(
    broken=("msgspec", "RuntimeError", "exit code 1, last step: starting; .*RuntimeError: planted"),
    missing=("onnx", "ImportError", r"pip install 'nereid-serving\[publish\]'"),
)
def test_failure_of_the_examiner_is_not_a_rejection(
    package, failure, message, make_request, tmp_path, monkeypatch
):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise {failure}('planted')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    with pytest.raises(OperationFailed, match=message) as caught:
        examine(make_request(classifier()))

    assert not isinstance(caught.value, Rejected)


def test_child_does_not_get_the_key_of_a_client(tmp_path, monkeypatch):
    program = "import os\n\n\ndef handle_request(request, write):\n    write('names', sorted(os.environ))\n"
    (tmp_path / "shows_environment.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NEREID_KEY", "secret")

    _, names = isolated_child.run("shows_environment", "", 60)

    assert "PYTHONPATH" in names
    assert "NEREID_KEY" not in names
