"""Reading, changing and completing config.pbtxt, and the parameters of a backend."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from nereid.base.assets import REPOSITORY
from nereid.base.config.model_config import ModelConfig, TensorSpec, read_pbtxt
from nereid.base.config.parameters import parse_bool, parse_int
from nereid.base.errors import InvalidConfig, OperationFailed
from nereid.repository.pbtxt import parse, rewrite, with_versions
from nereid.repository.repository_index import model_folders
from nereid.repository.triton_rules import are_complete, why_incomplete
from tests.conftest import ROOT
from tests.networks import tensor
from tests.tables import cases, rows


@dataclass(frozen=True, slots=True)
class Settings:
    size_px: int
    mean: tuple[float, ...] = ()


def config(tmp_path, **parameters: str) -> ModelConfig:
    model = {
        "name": "m",
        "max_batch_size": 8,
        "input": [{"name": "image", "data_type": "TYPE_STRING", "dims": [1]}],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }
    return ModelConfig.from_args(arguments(tmp_path, model, "CPU", "m_0_0"))


def arguments(tmp_path, document: dict, kind: str, instance: str) -> dict[str, str]:
    values = {"config": json.dumps(document), "repository": str(tmp_path / "m"), "version": "3"}
    values |= {"instance_kind": kind, "instance_device_id": "1" if kind == "GPU" else "0"}
    values["instance_name"] = instance
    return {f"model_{name}": value for name, value in values.items()}


def test_triton_arguments_and_file_give_the_same_config(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.pbtxt").write_text(
        'name: "m" max_batch_size: 8 input { name: "image" data_type: TYPE_STRING dims: [1] }'
        ' parameters { key: "size_px" value { string_value: "4" } }'
    )

    from_file, from_triton = ModelConfig.from_file(folder, 3), config(tmp_path, size_px="4")

    # Only the document itself differs: Triton writes integers, protobuf's JSON strings.
    assert replace(from_file, document={}) == replace(from_triton, document={}, is_first_instance=True)
    assert from_file.document == read_pbtxt(folder / "config.pbtxt")


@cases(
    plain=({}, TensorSpec("x", "TYPE_FP32", (4, 4), (4, 4), False, False)),
    reshape=({"reshape": {"shape": ["16"]}}, TensorSpec("x", "TYPE_FP32", (4, 4), (16,))),
    empty_reshape=({"reshape": {}}, TensorSpec("x", "TYPE_FP32", (4, 4), ())),
    optional=({"optional": True}, TensorSpec("x", "TYPE_FP32", (4, 4), (4, 4), is_optional=True)),
    ragged=({"allow_ragged_batch": True}, TensorSpec("x", "TYPE_FP32", (4, 4), (4, 4), is_ragged=True)),
)
def test_tensor_is_what_clients_and_network_see(extra, expected, tmp_path):
    """A reshape changes only what the network sees; int64 values are strings in JSON, and become numbers."""
    document = {"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["4", "4"], **extra}]}

    assert ModelConfig.from_document(document, tmp_path, 1).inputs == (expected,)


@cases(
    no_backend=(None, None, 1),
    onnxruntime_empty_list=("onnxruntime", [], 2),
    onnxruntime_no_count=("onnxruntime", [{"kind": "KIND_CPU"}], 2),
    another_backend_no_count=("fused", [{"kind": "KIND_CPU"}], 1),
    two_groups=(None, [{"count": 3}, {"kind": "KIND_CPU", "count": "2"}], 5),
    gpu_and_cpu=(None, [{"kind": "KIND_GPU", "count": 3}, {"kind": "KIND_CPU", "count": 1}], 1),
    kind_model=("onnxruntime", [{"kind": "KIND_MODEL"}], 2),
)
def test_instances_that_share_the_cores(backend, groups, expected, tmp_path):
    fields = {"backend": backend, "instance_group": groups}
    document = {name: entry for name, entry in fields.items() if entry is not None}

    assert ModelConfig.from_document(document, tmp_path, 1).cpu_instances == expected


@cases(
    no_file_profile=({}, "cpu", False),
    auto=({"config.pbtxt": "KIND_AUTO"}, "", False),
    cpu_and_gpu=({"config.pbtxt": "KIND_CPU KIND_GPU"}, "", True),
    gpu_profile_without_a_file=({"config.pbtxt": "KIND_GPU"}, "cpu", True),
    profile_on_the_cpu=({"config.pbtxt": "KIND_GPU", "configs/cpu.pbtxt": "KIND_CPU"}, "cpu", False),
    profile_on_a_gpu=({"config.pbtxt": "KIND_CPU", "configs/gpu.pbtxt": "KIND_GPU"}, "gpu", True),
    profile_of_another_name=({"config.pbtxt": "KIND_CPU", "configs/gpu.pbtxt": "KIND_GPU"}, "", False),
)
def test_gpu_is_named_by_the_file_in_use(files, profile, expected, tmp_path):
    """Triton resolves KIND_AUTO before a backend sees it, so only the file shows a named GPU."""
    (tmp_path / "configs").mkdir()
    for name, kinds in files.items():
        groups = [f"instance_group {{ kind: {kind} }}" for kind in kinds.split()]
        (tmp_path / name).write_text(" ".join(groups))

    assert ModelConfig.from_document({}, tmp_path, 1, "GPU").requests_gpu(profile) is expected


@cases(
    missing=({}, "parameter 'size_px' is required"),
    not_a_number=({"size_px": "big"}, "parameter 'size_px': expected int, got 'big'"),
    not_a_list_of_numbers=(
        {"size_px": "1", "mean": "1,x"},
        "parameter 'mean': expected floats separated by commas, got '1,x'",
    ),
)
def test_wrong_parameter_is_named(parameters, message, tmp_path):
    with pytest.raises(InvalidConfig, match=f"^model 'm': {message}$"):
        config(tmp_path, **parameters).settings(Settings)


@pytest.mark.parametrize("name", ["..", ".", "", "/etc", "m/../../x"])
def test_sibling_stays_in_the_repository(tmp_path, name):
    """A config cannot make the server read models from elsewhere."""
    with pytest.raises(InvalidConfig, match="which is not a folder of the repository"):
        config(tmp_path).sibling(name, 1)


def test_gpu_instance_needs_a_backend_that_uses_gpus(tmp_path):
    args = arguments(tmp_path, {"name": "m"}, "GPU", "m_0_1")

    expected = ModelConfig("m", 3, tmp_path / "m", (), (), 0, {}, {"name": "m"}, "GPU", 1, False)
    assert ModelConfig.from_args(args, may_use_gpu=True) == expected
    with pytest.raises(InvalidConfig, match=r"^model 'm', instance group: expected KIND_CPU, got KIND_GPU$"):
        ModelConfig.from_args(args)


def test_first_instance_is_that_of_the_first_group(tmp_path):
    document = {"name": "m", "instance_group": [{"name": "m_0", "count": 11}, {"name": "m_1", "count": 1}]}
    names = {"m_0_0": True, "m_0_10": False, "m_1_0": False}

    configs = {name: ModelConfig.from_args(arguments(tmp_path, document, "CPU", name)) for name in names}

    assert {name: config.is_first_instance for name, config in configs.items()} == names


SCORES = 'output_map { key: "y" value: "scores" }'


@cases(
    pinned=(f"model_version: 2 {SCORES}", "2"),
    not_pinned=(SCORES, "ensemble 'e', step 'net': expected a pinned version, got -1"),
    no_scores=("model_version: 2", "model 'm' names 'e', an ensemble without output 'scores'"),
)
def test_network_version_is_that_of_the_step_with_the_scores(text, found, tmp_path):
    (tmp_path / "e" / "1").mkdir(parents=True)
    step = f'{{ model_name: "net" {text} }}'
    (tmp_path / "e" / "config.pbtxt").write_text(f'name: "e" ensemble_scheduling {{ step {step} }}')

    try:
        version = config(tmp_path).pinned_network_version("e", 1, "scores")
    except InvalidConfig as error:
        version = str(error)

    assert version == found


@pytest.mark.parametrize("text", [None, 'backend: "onnxruntime"'], ids=["no config", "a network"])
def test_model_that_is_not_an_ensemble_is_the_network(tmp_path, text):
    (tmp_path / "net" / "3").mkdir(parents=True)
    if text:
        (tmp_path / "net" / "config.pbtxt").write_text(text)

    assert config(tmp_path).pinned_network_version("net", 3, "scores") == "3"
    with pytest.raises(InvalidConfig, match="names version 4 of 'net', which is not there"):
        config(tmp_path).pinned_network_version("net", 4, "scores")


@cases(
    missing=(None, "unable to find '{path}'"),
    not_a_field=(b'name: "m"\nmax_batchsize: 8\n', "'{path}': 2:1 : .*max_batchsize"),
    not_a_text=(b'name: "\xff"', "'{path}': 'utf-8' codec can't decode byte 0xff"),
)
def test_file_that_is_not_a_config_is_named(content, message, tmp_path):
    path = tmp_path / "config.pbtxt"
    if content:
        path.write_bytes(content)

    with pytest.raises(InvalidConfig, match="^" + message.format(path=path)):
        read_pbtxt(path)


def test_integers_are_read_as_stoi_does():
    numbers = {"0": 0, "-3": -3, "+3": 3, " \t7": 7, "4abc": 4, "1.9": 1, "007": 7}

    assert {text: parse_int(text) for text in numbers} == numbers
    for text in ("", "-", " ", "x4", "- 4", ".5"):
        with pytest.raises(InvalidConfig, match=f"^failed to convert '{text}' to integral number$"):
            parse_int(text)


def test_booleans_are_tritons_six_words():
    words = {"true": True, "TRUE": True, "On": True, "1": True, "False": False, "off": False, "0": False}

    assert {text: parse_bool(text) for text in words} == words
    for text in ("", "yes", "2", " 1", "t"):
        with pytest.raises(InvalidConfig, match=f"^failed to convert '{text}' to boolean$"):
            parse_bool(text)


CONFIGS = sorted((ROOT / "model_repository").rglob("*.pbtxt"))
TEXT = """# What it is for.
name: "net"
max_batch_size: 8  # as clients know it
input { name: "a{b" data_type: TYPE_FP32 dims: [ 3, 4 ] }
input < name: 'c' data_type: TYPE_FP32 dims: 1 >
# Two instances.
instance_group [ { kind: KIND_CPU count: 2 } ]
# Kept apart.
parameters { key: "first" value { string_value: "1" } }
# Goes.
parameters: { key: "second" value: { string_value: "2" } }
dynamic_batching {}
"""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_unchanged_text_stays(path):
    text = path.read_text()

    assert rewrite(text, parse(text)) == text


def test_only_what_changes_is_written_anew():
    new_config = parse(TEXT)
    new_config.max_batch_size = 16
    new_config.instance_group[0].count = 3
    new_config.dynamic_batching.max_queue_delay_microseconds = 500
    del new_config.parameters["second"]
    new_config.parameters["third"].string_value = "3"
    new_config.version_policy.all.SetInParent()

    changed = rewrite(TEXT, new_config)

    assert parse(changed) == new_config
    expected = TEXT.replace("max_batch_size: 8", "max_batch_size: 16")
    expected = expected.replace("[ { kind: KIND_CPU count: 2 } ]", "{ count: 3 kind: KIND_CPU }")
    expected = expected.replace('parameters: { key: "second" value: { string_value: "2" } }\n', "")
    expected = expected.replace("{}", "{ max_queue_delay_microseconds: 500 }")
    third = 'parameters { key: "third" value { string_value: "3" } }'
    assert changed == expected + "version_policy { all { } }\n" + third + "\n"


@cases(
    "text",
    list_and_entry="instance_group [ { count: 1 }, { count: 2 } ] instance_group { count: 4 }",
    joined_strings='name: "a" "b" max_batch_size: 8',
)
def test_unusual_layout_is_written_anew(text):
    new_config = parse(text)
    new_config.max_batch_size = 16
    del new_config.instance_group[1:]

    assert parse(rewrite(text, new_config)) == new_config


@rows(
    (
        "parameters [\n # first\n {key: 'a' value {string_value: '1'}},\n"
        " {key: 'b' value {string_value: '2'}} # second\n]\n",
        lambda config: setattr(config.parameters["b"], "string_value", "3"),
        ("{string_value: '2'}", '{ string_value: "3" }'),
    ),
    (
        "ensemble_scheduling { step [ # prepares\n {model_name: 'p' model_version: 1},\n"
        " {model_name: 'n' model_version: 2} # computes\n] }\n",
        lambda config: setattr(config.ensemble_scheduling.step[1], "model_version", 3),
        ("model_version: 2", "model_version: 3"),
    ),
    (
        "instance_group [ {\n kind: KIND_CPU  # no GPU\n} ]\n",
        lambda config: setattr(config.instance_group[0], "count", 2),
        ("GPU\n}", "GPU\ncount: 2\n}"),
    ),
)
def test_comments_inside_an_entry_stay(text, change, replaced):
    change(new_config := parse(text))

    assert rewrite(text, new_config) == text.replace(*replaced)
    assert parse(rewrite(text, new_config)) == new_config


def test_text_that_is_not_a_config_is_an_error():
    with pytest.raises(OperationFailed, match="cannot read the config: 1:1 : "):
        rewrite("what: 1", parse(""))


POLICY = "version_policy { specific { versions: [ 1, 3 ] } }"


@cases(
    empty=("", f"{POLICY}\n"),
    latest_and_comment=(
        "# {\nversion_policy { latest { num_versions: 2 } } # why\nname: 'a'\n",
        f"# {{\n{POLICY} # why\nname: 'a'\n",
    ),
    angle_brackets=("version_policy: <\n  all: <>\n>\nname: 'a}'", f"{POLICY}\nname: 'a}}'\n"),
    a_parameter_of_that_name=(
        'parameters { key: "version_policy" value { string_value: "{" } }\n',
        f'parameters {{ key: "version_policy" value {{ string_value: "{{" }} }}\n{POLICY}\n',
    ),
)
def test_only_the_policy_changes_with_the_versions(text, expected):
    assert with_versions(text, [3, 1]) == expected


def test_change_of_versions_never_removes_a_comment():
    message = r"cannot change version_policy in this layout; fix: write version_policy .*\[ 1, 2 \]"
    with pytest.raises(OperationFailed, match=message):
        with_versions('# why\nname: "a" "b" max_batch_size: 8', [1, 2])


TENSORS = tensor("input", "x", "FP32", [3]) + tensor("output", "scores", "FP32", [3])
NAME = 'name: "one"\n'
PYTHON = f'{NAME}backend: "python"\n{TENSORS}'
CODE = "class TritonPythonModel: ..."
COMPLETING = "class TritonPythonModel:\n    def auto_complete_config(config): ..."
STEPS = 'ensemble_scheduling { step { model_name: "a" model_version: 1 } }\n'


@pytest.mark.parametrize("profile", ["ensemble", "cpu", "gpu"])
def test_default_models_are_complete(profile):
    """So the default server is back quickly."""
    assert are_complete(REPOSITORY, profile, [folder.name for folder in model_folders(REPOSITORY)])


@cases(
    our_backend=(f'{NAME}backend: "onnxruntime"\n{TENSORS}', "", True),
    ensemble=(f'{NAME}platform: "ensemble"\n{TENSORS}{STEPS}', "", True),
    Python=(PYTHON, CODE, True),
    Python_that_completes=(PYTHON, COMPLETING, False),
    Python_with_a_base=(PYTHON, "from base import Base\nclass TritonPythonModel(Base): ...", False),
    Python_from_elsewhere=(PYTHON, "from base import TritonPythonModel", False),
    another_backend=(f'{NAME}backend: "openvino"\n{TENSORS}', "", False),
    backend_from_the_file=(f"{NAME}{TENSORS}", "", False),
    without_a_name=(f'backend: "onnxruntime"\n{TENSORS}', "", False),
    without_tensors=(f'{NAME}backend: "onnxruntime"\n', "", False),
    no_config=(None, "", False),
)
def test_config_is_complete(config, code, expected, tmp_path: Path):
    (tmp_path / "one" / "1").mkdir(parents=True)
    (tmp_path / "one" / "1" / "model.py").write_text(code)
    if config is not None:
        (tmp_path / "one" / "config.pbtxt").write_text(config)

    assert are_complete(tmp_path, "", ["one"]) == expected


def test_unreadable_code_is_named(tmp_path: Path):
    """Python code of another encoding may hide the completion, so the reason says what is expected."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n" + CODE.encode())
    (tmp_path / "config.pbtxt").write_text(PYTHON)

    assert why_incomplete(tmp_path, "").startswith("its model.py is expected in UTF-8: 'utf-8' codec")
