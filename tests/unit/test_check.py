"""`nereid check` of one good, tiny repository, and of the same with one fault each."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nereid.cli.main import app
from nereid.repository.check import check
from tests.commands import captured
from tests.networks import OPSET, parameter, store
from tests.tables import cases
from tests.unit.test_examine import PREPROCESS, classifier

NET = """name: "net" backend: "onnxruntime" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" }
version_policy { specific { versions: [ 1, 2 ] } }
"""
PUBLIC = """max_batch_size: 8
input { name: "image" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" }
"""
WARM_UP = (
    ' model_warmup {{ name: "w" batch_size: {size} inputs {{ key: "{name}" value {{ data_type: TYPE_FP32 '
    "dims: [ 3, 8, 8 ] zero_data: true }} }} }}"
)
ENSEMBLE = f"""name: "whole" platform: "ensemble" {PUBLIC}
ensemble_scheduling {{
  step {{
    model_name: "pre" model_version: 1
    input_map {{ key: "image" value: "image" }} output_map {{ key: "x" value: "between" }}
  }}
  step {{
    model_name: "net" model_version: 2
    input_map {{ key: "x" value: "between" }} output_map {{ key: "scores" value: "scores" }}
  }}
}}
"""
PARTS = {"preprocess": "pre", "preprocess_version": 1, "network": "net", "network_version": 2}
FUSED = f'name: "whole" backend: "fused" {PUBLIC}' + "".join(parameter(*part) for part in PARTS.items())
ROUTE = f'name: "route" backend: "ab_router" {PUBLIC}' + parameter("route", "route.json")
VARIANTS = {"variants": [{"name": "a", "model": "whole", "version": 1, "weight": 1}], "default": "a"}
VARIANTS |= {"salts": {"variants": "salt", "shadows": "pepper"}}
FOREIGN = 'name: "foreign" backend: "python" max_batch_size: 8'
CPU = "whole/configs/cpu.pbtxt"

Fault = Callable[[Path], None]


def publish(folder: Path) -> None:
    """Write the checksums of a version, with a comment as published versions have it."""
    names = sorted(path.name for path in folder.iterdir())
    sums = captured(["sha256sum", *names], cwd=folder, check=True).stdout
    (folder / "SHA256SUMS").write_text(f"# published by nereid\n{sums}")


@pytest.fixture
def repository(tmp_path) -> Path:
    for version in (1, 2):
        publish(store(tmp_path, "net", classifier(), NET, version, weights="w.bin").parent)
    for name, text in {"pre": PREPROCESS, "whole": ENSEMBLE, "route": ROUTE, "foreign": FOREIGN}.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / ".gitkeep").touch()
        (tmp_path / name / "config.pbtxt").write_text(text)
    (tmp_path / "foreign" / "1" / "model.py").write_text("# nobody's")
    (tmp_path / "foreign" / "1" / ".gitkeep").unlink()
    publish(tmp_path / "foreign" / "1")
    (tmp_path / "whole" / "configs").mkdir()
    (tmp_path / "whole" / "configs" / "cpu.pbtxt").write_text(FUSED)
    for name in ("net", "whole", "route"):
        (tmp_path / name / "labels.txt").write_text("a\nb\nc\nd\n")
    (tmp_path / "route.json").write_text(json.dumps(VARIANTS))
    return tmp_path


def findings(repository: Path, *verdicts: str) -> list[str]:
    selected = verdicts or ("note", "fail")
    return [f"{e.model}, {e.what}: {e.found}" for e in check(repository) if e.verdict in selected]


def edit(path: str, old: str, new: str) -> Fault:
    """Replace text in a file of the repository, which must be there."""

    def change(repository: Path) -> None:
        text = (repository / path).read_text()
        assert old in text
        (repository / path).write_text(text.replace(old, new))

    return change


def write(path: str, content: str | bytes) -> Fault:
    data = content.encode() if isinstance(content, str) else content
    return lambda repository: (repository / path).write_bytes(data)


def remove(path: str) -> Fault:
    return lambda repository: (repository / path).unlink()


def cycle(*others: str) -> Fault:
    """Make ensembles that form a cycle: each is a step of the one before, `whole` of the last."""

    def change(repository: Path) -> None:
        (repository / "whole" / "configs" / "cpu.pbtxt").unlink()
        edit("whole/config.pbtxt", '"net"', f'"{others[0]}"')(repository)
        for name, step in zip(others, (*others[1:], "whole"), strict=True):
            (repository / name / "1").mkdir(parents=True)
            text = ENSEMBLE.replace('"whole"', f'"{name}"').replace('"net"', f'"{step}"')
            (repository / name / "config.pbtxt").write_text(text)

    return change


def version(operator: str = "Softmax", opset: int = OPSET) -> Fault:
    def change(repository: Path) -> None:
        model = classifier(opset=opset)
        model.graph.node[2].op_type = operator
        path = repository / "net" / "2"
        (path / "model.onnx").write_bytes(model.SerializeToString())
        (path / "w.bin").unlink()
        (path / "SHA256SUMS").unlink()
        publish(path)

    return change


def link_labels(repository: Path) -> None:
    (repository / "whole" / "labels.txt").unlink()
    (repository / "whole" / "labels.txt").symlink_to("../net/labels.txt")


net, pre, whole = (partial(edit, f"{name}/config.pbtxt") for name in ("net", "pre", "whole"))
fused = partial(edit, CPU)


SIZE, INPUT_MAP = "max_batch_size: 8", 'input_map { key: "x" value: "between" }'
OUTPUT_MAP = 'output_map { key: "x" value: "between" }'
STEPS = ENSEMBLE.partition("ensemble_scheduling")[2]
FAULTS = {
    "backend": (net('"onnxruntime"', '"onnxrutime"'), "backend: expected one of .* is 'onnxruntime'"),
    "platform": (net('backend: "onnxruntime"', 'platform: "onnx"'), "platform: expected one of ensemble, "),
    "bounds": (net(SIZE, parameter("nereid.instances", "4-1") + SIZE), "': expected LOW-HIGH"),
    "preferred-size": (
        net(SIZE, SIZE + " dynamic_batching { preferred_batch_size: [ 16 ] }"),
        r"preferred_batch_size: expected 1 to 8 .*, got 16",
    ),
    # Triton 24.10 ends with a segmentation fault instead of refusing it, in most attempts.
    "warm-up-batch": (net(SIZE, SIZE + WARM_UP.format(size=9, name="x")), "batch_size of at most 8, got 9"),
    "warm-up-input": (net(SIZE, SIZE + WARM_UP.format(size=1, name="z")), "expected the inputs x, got z"),
    "space": (lambda models: (models / "pre").rename(models / "a space"), "the name has a space"),
    "python-file": (remove("foreign/1/model.py"), "foreign, .* Python model file not found in .*model.py"),
    "thread-count": (net(SIZE, parameter("intra_op_thread_count", "two") + SIZE), "'two' to int"),
    "input-without-name": (net('name: "x" ', ""), "net, .*the config is incomplete: Key"),
    "step-without-name": (whole('model_name: "pre" ', ""), "whole, .*config is incomplete"),
    "route-tensors": (
        edit("route/config.pbtxt", "dims: [ 4 ]", "dims: [ 5 ]"),
        r"names \'whole\' for \'scores\': expected TYPE_FP32 \[5\]",
    ),
    "no-such-operator": (version(operator="Softmaxx"), "version 2: .* No Op registered for Softmaxx"),
    "cycle-of-three": (cycle("other", "another"), "another, .* a cycle: another, whole, other, another"),
    "no-steps": (whole(STEPS, "{}"), "whole, .*: expected steps in ensemble_scheduling, got none"),
    "config-text": (net("dims:", "dim:"), 'net, config.pbtxt: .*no field named "dim"'),
    "profile-text": (write(CPU, "{"), "whole, configs/cpu.pbtxt: "),
    "name": (pre('"pre"', '"other"'), "pre, config.pbtxt: expected name 'pre' .*, got 'other'"),
    "version-missing": (net("1, 2", "1, 3"), "version 3, which does not exist"),
    "nothing-served": (net("[ 1, 2 ]", "[ ]"), "net, config.pbtxt, versions: no version would be served"),
    "network-missing": (remove("net/2/model.onnx"), "net, config.pbtxt, onnxruntime: version 2: cannot read"),
    "network-text": (write("net/1/model.onnx", "oops"), "version 1: .* got a text file"),
    "opset": (version(opset=27), "version 2: 'model.onnx': expected opset at most .*, got 27"),
    "shape": (net("[ 3, 8, 8 ]", "[ 3, 9, 9 ]"), r"version 1: .* 'x': expected shape \[-1,3,8,8\] of the n"),
    "step-model": (whole('"pre"', '"gone"'), "whole, .*ensemble: step 'gone' does not exist"),
    "step-self": (whole('"pre"', '"whole"'), "step 'whole' is the ensemble itself"),
    "step-unpinned": (whole("version: 2", "version: -1"), "expected model_version 1 or more, got -1"),
    "step-version": (whole("version: 2", "version: 3"), "pinned to version 3, which does not exist"),
    "step-not-served": (net("1, 2", "1"), "pinned to version 2, which its version_policy does not serve"),
    "map-key": (whole('input_map { key: "x"', 'input_map { key: "y"'), "'net' has no input 'y', it has: x"),
    "map-missing": (whole(INPUT_MAP, ""), "step 'net' needs input 'x', which is not in its input_map"),
    "map-value": (whole(INPUT_MAP, INPUT_MAP.replace("between", "z")), "'z', which no step provides"),
    "step-shape": (pre("[ 3, 8, 8 ]", "[ 3, 9, 9 ]"), r"'between': expected .*, got .* \[-1, 3, 9, 9\]"),
    "ensemble-output": (
        whole("dims: [ 4 ]", "dims: [ 5 ]"),
        r"output needs tensor \'scores\': expected .* \[-1, 5\], got ",
    ),
    "ensemble-batch": (whole(SIZE, "max_batch_size: 9"), "'pre': expected max_batch_size 9 or more"),
    "given-twice": (whole(OUTPUT_MAP, OUTPUT_MAP.replace("between", "image")), "'image' is provided twice"),
    "fused-version": (fused('"2"', '"3"'), "fused: model 'whole' names version 3 of 'net', which is not"),
    "fused-parameter": (fused('"network_version"', '"net_version"'), "unknown parameter 'net_version'"),
    "fused-steps": (fused('"2"', '"1"'), "expected version 2 of 'net', a step .*, got version 1"),
    "fused-shape": (pre("[ 3, 8, 8 ]", "[ 3, 9, 9 ]"), r"'net': expected .* \[3, 9, 9\], got "),
    "fused-output": (fused("[ 4 ]", "[ 5 ]"), r"fused: its output: expected .* \[4\], got .* \[5\]"),
    "preprocess": (pre("efficientnet_lite", "resnet"), "pre, .*preset: expected one of"),
    "route-file": (remove("route.json"), "route, config.pbtxt, ab_router: cannot read '.*route.json'"),
    "route-text": (edit("route.json", '"default": "a"', '"default": "b"'), "route, .*ab_router: "),
    "route-version": (edit("route.json", '"version": 1', '"version": 2'), "names version 2 of 'whole'"),
    "route-not-served": (
        whole("ensemble_scheduling", "version_policy { specific { } } ensemble_scheduling"),
        "version 1 of 'whole', which is not served",
    ),
    "labels-count": (write("whole/labels.txt", "a\nb\nc\n"), "expected 4 labels for .* 'scores', got 3"),
    "labels-missing": (remove("route/labels.txt"), "route, config.pbtxt, labels: cannot read label file"),
    "labels-elsewhere": (whole('"labels.txt"', '"../net/labels.txt"'), "is outside the model's folder"),
    "labels-link": (link_labels, "labels: label file 'labels.txt' is a link; fix: "),
    "changed": (write("net/1/w.bin", bytes(3072)[:-1] + b"\1"), "version 1: 'w.bin' has changed: "),
    "added": (write("net/1/notes.txt", "new"), "version 1: 'notes.txt' was added later"),
    "listed-gone": (remove("net/1/w.bin"), "version 1: 'w.bin' is missing: it is in SHA256SUMS"),
    "listed-elsewhere": (edit("net/1/SHA256SUMS", "w.bin", "../2/w.bin"), "'../2/w.bin' is missing: "),
    "sums-text": (write("net/1/SHA256SUMS", "oops"), "version 1: SHA256SUMS: expected a .*, got 'oops'"),
}


@cases(("fault", "reason"), **FAULTS)
def test_fault_is_found(repository, fault, reason):
    fault(repository)

    failures = findings(repository, "fail")

    assert any(re.search(reason, failure) for failure in failures), failures


def test_oddities_are_noted(repository):
    """Triton loads hidden folders, too; hidden files do not matter."""
    (repository / "pre" / "1" / ".gitkeep").unlink()
    (repository / "net" / "1" / "SHA256SUMS").unlink()
    net(SIZE, parameter("intra_op_thread_cnt", "1") + SIZE)(repository)
    (repository / ".git" / "1").mkdir(parents=True)
    (repository / ".gitignore").touch()

    assert findings(repository) == [
        ".git, hidden folder: Triton takes a hidden folder for a model when it loads all models",
        "net, config.pbtxt, Triton's rules: the backend 'onnxruntime' does not read the parameter "
        "'intra_op_thread_cnt'; the nearest name is 'intra_op_thread_count'",
        "net, version 1: not published by nereid: no SHA256SUMS",
        "pre, version 1: the folder is empty, and git does not store empty folders",
    ]


def test_custom_operators_are_noted(repository):
    """A network with custom operators is a note: the server may have their library."""
    model = classifier()
    model.graph.node[2].domain = "com.example"
    model.opset_import.add(domain="com.example", version=1)
    store(repository, "custom", model, None)

    assert findings(repository)[0] == (
        "custom, config.pbtxt, onnxruntime: version 1 has custom operators of com.example; "
        "every server needs their library"
    )


def test_command_prints_counts_and_the_first_failure(repository):
    good = CliRunner().invoke(app, ["check", str(repository)])
    assert {finding.model for finding in check(repository)} == {"net", "pre", "whole", "route", "foreign"}
    (repository / "route.json").unlink()
    bad = CliRunner().invoke(app, ["check"], env={"NEREID_REPOSITORY": str(repository), "COLUMNS": "200"})
    one = CliRunner().invoke(app, ["check", str(repository), "--model", "net"])

    assert CliRunner().invoke(app, ["check", str(repository), "--json"]).exit_code == 1
    assert (one.exit_code, one.stdout) == (0, "1 model, 2 versions: 0 notes, 0 failures\n")
    assert (good.exit_code, good.stdout) == (0, "5 models, 6 versions: 0 notes, 0 failures\n")
    assert (bad.exit_code, bad.stdout.splitlines()[-1]) == (1, "5 models, 6 versions: 0 notes, 1 failure")
    assert bad.stderr.startswith("error: 1 failure, the first: route, config.pbtxt, ab_router: cannot read")
