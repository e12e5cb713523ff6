"""Models of a repository in a profile: hidden ones, and the threads of the others."""

from pathlib import Path

import pytest

from nereid.processes import available_cores
from nereid.repository.layout import Threads, configs, describe_threads, hidden_models, thread_budget
from nereid.serving_errors import InvalidConfig

INTRA = 'parameters { key: "intra_op_thread_count" value { string_value: "%d" } }'
NETWORK = 'backend: "onnxruntime" instance_group { kind: KIND_CPU count: 2 } ' + INTRA % 3
FUSED = (
    'backend: "fused" instance_group { kind: KIND_CPU count: 4 }'
    ' parameters { key: "preprocess" value { string_value: "pre" } }'
    ' parameters { key: "preprocess_version" value { string_value: "2" } }'
    ' parameters { key: "network" value { string_value: "net" } }'
    ' parameters { key: "network_version" value { string_value: "1" } }'
)


def ensemble(*models: str) -> str:
    """Write an ensemble of these steps."""
    steps = " ".join(f'step {{ model_name: "{model}" }}' for model in models)
    return f'platform: "ensemble" ensemble_scheduling {{ {steps} }}'


@pytest.fixture
def make(tmp_path):
    """Write a repository: `net=` is the content of net/config.pbtxt, `net__cpu=` of net/configs/cpu.pbtxt."""

    def repository(**files: str) -> Path:
        for name, content in files.items():
            model, _, profile = name.partition("__")
            folder = tmp_path / model
            (folder / "1").mkdir(parents=True, exist_ok=True)
            (folder / "configs").mkdir(exist_ok=True)
            path = folder / "configs" / f"{profile}.pbtxt" if profile else folder / "config.pbtxt"
            path.write_text(content)
        return tmp_path

    return repository


def test_profile_replaces_the_plain_config(make):
    """A model with a file for the profile is served from it, every other from its plain one."""
    repository = make(a='name: "a"', b='name: "b"', b__cpu='name: "b" max_batch_size: 4')

    assert configs(repository, "cpu") == {"a": {"name": "a"}, "b": {"name": "b", "max_batch_size": 4}}
    assert configs(repository) == configs(repository, "other") == {"a": {"name": "a"}, "b": {"name": "b"}}


def test_model_without_a_config_is_a_model(make):
    """A folder without a config is a model that Triton completes; files are not models."""
    repository = make(a='name: "a"')
    (repository / "bare" / "1").mkdir(parents=True)
    (repository / "README.md").touch()

    assert configs(repository) == {"a": {"name": "a"}, "bare": {}}


def test_broken_config_is_named(make):
    """The message has the path, so that a repository of many models leads to the one at fault."""
    repository = make(good='name: "good"', bad="what: 1")

    with pytest.raises(InvalidConfig, match=rf"{repository}/bad/config\.pbtxt': 1:1 : .*what"):
        configs(repository)


@pytest.mark.parametrize(
    ("files", "hidden"),
    [
        ({"net": NETWORK}, set()),
        ({"e": ensemble("pre", "net"), "pre": "", "net": ""}, set()),
        ({"e": ensemble("pre", "net"), "e__cpu": FUSED, "pre": "", "net": ""}, {"pre", "net"}),
        (
            {"e": ensemble("pre", "net"), "e__cpu": FUSED, "other": ensemble("pre"), "pre": "", "net": ""},
            {"net"},
        ),
        (
            {
                "e": ensemble("pre", "net"),
                "e__cpu": FUSED,
                "f": ensemble("net", "post"),
                "f__cpu": FUSED,
                **dict.fromkeys(("pre", "net", "post"), ""),
            },
            {"pre", "net", "post"},
        ),
        ({"e": ensemble("pre", "net"), "e__cpu": ensemble("net"), "pre": "", "net": ""}, set()),
        ({"e": ensemble("pre", "net"), "e__gpu": FUSED, "pre": "", "net": ""}, set()),
        ({"e": NETWORK, "e__cpu": ensemble("net"), "net": ""}, set()),
    ],
    ids=[
        "no ensemble",
        "ensemble in every profile",
        "replaced ensemble",
        "step of another ensemble",
        "two replaced ensembles",
        "shorter ensemble",
        "replaced in another profile",
        "ensemble in this profile only",
    ],
)
def test_hidden_models_are_steps_of_nobody(make, files, hidden):
    """Hidden is what was a step of a replaced ensemble and is none of an ensemble that is served."""
    assert hidden_models(make(**files), "cpu") == hidden


def test_step_without_a_config_is_hidden(make):
    """A step needs no config of its own to have lost its only user."""
    repository = make(e=ensemble("bare"), e__cpu=FUSED)
    (repository / "bare" / "1").mkdir(parents=True)

    assert hidden_models(repository, "cpu") == {"bare"}


@pytest.mark.parametrize(
    ("profile", "hidden"),
    [("cpu", {"efficientnet_lite0", "imagenet_preprocess"}), ("ensemble", set()), ("", set())],
    ids=["cpu", "ensemble", "none"],
)
def test_hidden_models_of_this_repository(root, profile, hidden):
    """Profile `cpu` runs both steps inside another model; the ensemble needs them."""
    assert hidden_models(root / "model_repository", profile) == hidden


@pytest.mark.parametrize(
    ("files", "budget"),
    [
        ({}, []),
        ({"net": NETWORK}, [Threads("net", 2, 3)]),
        ({"net": NETWORK.replace("2", "5")}, [Threads("net", 5, 3)]),
        ({"net": NETWORK.replace("KIND_CPU", "KIND_GPU")}, []),
        ({"net": 'platform: "onnxruntime_onnx" ' + INTRA % 7}, [Threads("net", 2, 7)]),
        ({"net": 'backend: "preprocess"', "e": ensemble("net")}, []),
        ({"a": FUSED, "net": NETWORK}, [Threads("a", 4, 3), Threads("net", 2, 3)]),
        ({"e": ensemble("net"), "e__cpu": FUSED, "net": NETWORK}, [Threads("e", 4, 3)]),
        ({"net": NETWORK, "net__cpu": 'backend: "onnxruntime" ' + INTRA % 9}, [Threads("net", 2, 9)]),
    ],
    ids=[
        "no model",
        "network",
        "five instances",
        "on a gpu",
        "platform and default count",
        "no network",
        "fused beside its network",
        "fused in place of its network",
        "profile",
    ],
)
def test_budget_counts_every_model_that_runs_a_network(make, files, budget):
    """A fused model runs its network with its own instances and the network's threads."""
    assert thread_budget(make(**files), "cpu") == budget


def test_model_without_a_config_counts(make):
    """A file `model.onnx` is enough for Triton, which makes two instances of it that share the cores."""
    repository = make()
    (repository / "bare" / "1").mkdir(parents=True)
    (repository / "bare" / "1" / "model.onnx").touch()

    assert thread_budget(repository, "cpu") == [Threads("bare", 2, max(1, available_cores() // 2))]


@pytest.mark.parametrize(
    ("profile", "budget"),
    [
        ("cpu", [Threads("classify_v1", 2, 1), Threads("classify_v2", 2, 1)]),
        ("ensemble", [Threads("efficientnet_lite0", 4, 1)]),
    ],
)
def test_budget_of_this_repository(root, profile, budget):
    """One thread per instance, whichever model runs the network."""
    assert thread_budget(root / "model_repository", profile) == budget


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ('"net"', '"../net"', "model 'a' names '../net', which is not a folder of the repository"),
        ('"1"', '"7"', "model 'a' names version 7 of 'net', which is not there"),
    ],
    ids=["network", "version"],
)
def test_fused_model_without_its_network_is_refused(make, right, wrong, message):
    """A budget of what cannot be loaded would be a guess."""
    repository = make(a=FUSED.replace(right, wrong), net=NETWORK)

    with pytest.raises(InvalidConfig) as raised:
        thread_budget(repository, "cpu")

    assert str(raised.value) == message


@pytest.mark.parametrize("left_out", ["preprocess", "preprocess_version", "network", "network_version"])
def test_fused_model_without_a_parameter_is_refused(make, left_out):
    """A config that cannot be loaded is refused as one, here as in the server."""
    # The name stands for Triton's own parameter, which every backend lets pass.
    repository = make(a=FUSED.replace(f'"{left_out}"', '"EXECUTION_ENV_PATH"'), net=NETWORK)

    with pytest.raises(InvalidConfig) as raised:
        thread_budget(repository, "cpu")

    assert str(raised.value) == f"model 'a': parameter '{left_out}' is required"


def test_budget_within_the_cores_is_a_fact():
    """The line names the sum, the cores, and every model with its instances and threads."""
    cores = available_cores()

    assert describe_threads([Threads("a", 1, cores), Threads("b", 0, 9)]) == (
        f"{cores} network threads on {cores} cores (a 1x{cores}, b 0x9)",
        True,
    )


def test_budget_without_models_is_none():
    """A repository without networks has the text `none`."""
    assert describe_threads([]) == (f"0 network threads on {available_cores()} cores (none)", True)


def test_budget_of_variants_may_share_the_cores():
    """Two variants that fill the cores each are not a warning: the shipped default is such."""
    cores = available_cores()

    assert describe_threads([Threads("a", cores, 1), Threads("b", cores, 1)]) == (
        f"{2 * cores} network threads on {cores} cores (a {cores}x1, b {cores}x1)",
        True,
    )


def test_model_beyond_the_cores_is_a_warning():
    """A model with more threads than cores gives a warning with its effect."""
    cores = available_cores()

    assert describe_threads([Threads("a", 2, cores)]) == (
        f"{2 * cores} network threads on {cores} cores (a 2x{cores}): instances of one model slow each other "
        "down",
        False,
    )
