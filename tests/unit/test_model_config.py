"""Reading config.pbtxt: from Triton's arguments, from a file, and a backend's own parameters."""

import json
from dataclasses import dataclass

import pytest

from python_backend.errors import InvalidConfig
from python_backend.model_config import ModelConfig, TensorSpec, read_pbtxt


@dataclass(frozen=True, slots=True)
class Settings:
    """One parameter of each type."""

    size_px: int
    mean: tuple[float, ...] = ()
    name: str = "x"
    is_on: bool = False


def config(tmp_path, **parameters: str) -> ModelConfig:
    """Build a config with these parameters, as Triton hands it over."""
    model = {
        "name": "m",
        "max_batch_size": 8,
        "input": [{"name": "image", "data_type": "TYPE_STRING", "dims": [1]}],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }
    args = {
        "model_config": json.dumps(model),
        "model_repository": str(tmp_path / "m"),
        "model_version": "3",
        "model_instance_kind": "CPU",
    }
    return ModelConfig.from_args(args)


def test_triton_arguments_and_file_give_the_same_config(tmp_path):
    """A model reads itself from Triton and its sibling from disk; both ways agree."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.pbtxt").write_text(
        'name: "m" max_batch_size: 8 input { name: "image" data_type: TYPE_STRING dims: [1] }'
        ' parameters { key: "size_px" value { string_value: "4" } }'
    )

    assert ModelConfig.from_file(folder, 3) == config(tmp_path, size_px="4")


def test_tensor_dims_are_integers(tmp_path):
    """Protobuf's JSON writes int64 as strings; dims are numbers for us."""
    assert config(tmp_path).inputs == (TensorSpec("image", "TYPE_STRING", (1,)),)


def test_settings_take_their_types_from_the_dataclass(tmp_path):
    """Every parameter arrives as the type its field names."""
    parsed = config(tmp_path, size_px="224", mean="1, 2.5", name="y", is_on="TRUE").settings(Settings)

    assert parsed == Settings(224, (1.0, 2.5), "y", True)


def test_tritons_own_parameters_pass(tmp_path):
    """FORCE_CPU_ONLY_INPUT_TENSORS is Triton's and no backend's business."""
    parsed = config(tmp_path, size_px="1", FORCE_CPU_ONLY_INPUT_TENSORS="no").settings(Settings)

    assert parsed == Settings(1)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "model 'm' needs parameter 'size_px'"),
        (
            {"size_px": "1", "sise": "2"},
            "model 'm' has unknown parameter 'sise', known are: is_on, mean, name, size_px",
        ),
        ({"size_px": "big"}, "model 'm', parameter 'size_px': expected int, got 'big'"),
        (
            {"size_px": "1", "mean": "1,x"},
            "model 'm', parameter 'mean': expected tuple[float, ...], got '1,x'",
        ),
        ({"size_px": "1", "is_on": "perhaps"}, "model 'm', parameter 'is_on': expected bool, got 'perhaps'"),
    ],
    ids=["missing", "unknown", "not a number", "not a list of numbers", "not a boolean"],
)
def test_wrong_parameter_is_named(tmp_path, parameters, message):
    """A wrong parameter fails the load with its name, what was expected and what came."""
    with pytest.raises(InvalidConfig) as raised:
        config(tmp_path, **parameters).settings(Settings)

    assert str(raised.value) == message


@pytest.mark.parametrize("name", ["..", ".", "", "../other", "/etc", "m/../../x"])
def test_sibling_stays_in_the_repository(tmp_path, name):
    """A config cannot make the server read models from elsewhere."""
    with pytest.raises(InvalidConfig, match="not a folder beside it"):
        config(tmp_path).sibling(name, 1)


def test_sibling_version_must_exist(tmp_path):
    """A pinned version that is not there fails the load, by name."""
    (tmp_path / "other").mkdir()

    with pytest.raises(InvalidConfig, match="model 'm' names version 7 of 'other', which is not there"):
        config(tmp_path).sibling("other", 7)


def test_gpu_instance_is_refused(tmp_path):
    """No backend of this release computes on a GPU, and none pretends to."""
    args = {"model_config": '{"name": "m"}', "model_repository": str(tmp_path), "model_version": "1"}

    with pytest.raises(InvalidConfig, match="model 'm': this release serves KIND_CPU instances only"):
        ModelConfig.from_args(args | {"model_instance_kind": "GPU"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('step { model_name: "net" model_version: 2 output_map { key: "y" value: "scores" } }', None),
        ('step { model_name: "net" output_map { key: "y" value: "scores" } }', "must pin 'net', got -1"),
        ('step { model_name: "net" model_version: 2 }', "no ensemble with scores"),
    ],
    ids=["pinned", "not pinned", "no scores"],
)
def test_network_version_is_that_of_the_step_with_the_scores(tmp_path, text, message):
    """The route reads from a pinned ensemble which network answers; -1 is refused."""
    (tmp_path / "e" / "1").mkdir(parents=True)
    (tmp_path / "e" / "config.pbtxt").write_text(f'name: "e" ensemble_scheduling {{ {text} }}')

    if message is None:
        assert config(tmp_path).pinned_network_version("e", 1) == "2"
    else:
        with pytest.raises(InvalidConfig, match=message):
            config(tmp_path).pinned_network_version("e", 1)


def test_unparsable_file_is_named_with_its_line(tmp_path):
    """The message leads to the place of the mistake."""
    path = tmp_path / "config.pbtxt"
    path.write_text('name: "m"\nmax_batchsize: 8\n')

    with pytest.raises(InvalidConfig, match=r"config\.pbtxt': 2:1 : .*max_batchsize"):
        read_pbtxt(path)
