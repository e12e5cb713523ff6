"""Models of a repository in a profile: hidden ones, and the threads of the others."""

import re
from pathlib import Path

import pytest

from nereid.base.errors import InvalidConfig
from nereid.base.processes import available_cores
from nereid.repository import repository_index
from nereid.repository.repository_index import Threads, configs, thread_budget
from tests.networks import parameter
from tests.tables import cases

INTRA = parameter("intra_op_thread_count", "%d")
NETWORK = 'backend: "onnxruntime" instance_group { kind: KIND_CPU count: 2 } ' + INTRA % 3
PARTS = {"preprocess": "pre", "preprocess_version": 2, "network": "net", "network_version": 1}
FUSED = 'backend: "fused" instance_group { kind: KIND_CPU count: 4 }\n'
FUSED += "".join(parameter(*part) for part in PARTS.items())


def ensemble(*models: str) -> str:
    steps = " ".join(f'step {{ model_name: "{model}" }}' for model in models)
    return f'platform: "ensemble" ensemble_scheduling {{ {steps} }}'


@pytest.fixture
def make(tmp_path):
    """Write a repository: `net=` is net/config.pbtxt, or None for a network without a config.

    `net__cpu=` is net/configs/cpu.pbtxt.
    """

    def repository(**files: str | None) -> Path:
        for name, content in files.items():
            model, _, profile = name.partition("__")
            folder = tmp_path / model
            (folder / "1").mkdir(parents=True, exist_ok=True)
            (folder / "configs").mkdir(exist_ok=True)
            config = folder / "configs" / f"{profile}.pbtxt" if profile else folder / "config.pbtxt"
            path = folder / "1" / "model.onnx" if content is None else config
            path.write_text(content or "")
        return tmp_path

    return repository


def test_profile_replaces_the_plain_config(make):
    repository = make(a='name: "a"', b='name: "b"', b__cpu='name: "b" max_batch_size: 4')

    assert configs(repository, "cpu") == {"a": {"name": "a"}, "b": {"name": "b", "max_batch_size": 4}}
    assert configs(repository) == configs(repository, "other") == {"a": {"name": "a"}, "b": {"name": "b"}}


STEPS = {"e": ensemble("pre", "net"), "pre": "", "net": ""}


@cases(
    ensemble_in_every_profile=(STEPS, set()),
    replaced_ensemble=(STEPS | {"e__cpu": FUSED}, {"pre", "net"}),
    step_of_another_ensemble=(STEPS | {"e__cpu": FUSED, "other": ensemble("pre")}, {"net"}),
    shorter_ensemble=(STEPS | {"e__cpu": ensemble("net")}, set()),
    replaced_in_another_profile=(STEPS | {"e__gpu": FUSED}, set()),
    ensemble_in_this_profile_only=({"e": NETWORK, "e__cpu": ensemble("net"), "net": ""}, set()),
    step_without_a_config=({"e": ensemble("bare"), "e__cpu": FUSED, "bare": None}, {"bare"}),
)
def test_hidden_models_are_steps_of_replaced_ensembles(files, hidden, make):
    assert repository_index.unused_models(make(**files), "cpu") == hidden


@cases(
    no_model=({}, []),
    network=({"net": NETWORK}, [Threads("net", 2, 3)]),
    on_a_gpu=({"net": NETWORK.replace("KIND_CPU", "KIND_GPU")}, []),
    platform=({"net": 'platform: "onnxruntime_onnx" ' + INTRA % 7}, [Threads("net", 2, 7)]),
    no_network=({"net": 'backend: "preprocess"', "e": ensemble("net")}, []),
    fused_and_its_network=({"a": FUSED, "net": NETWORK}, [Threads("a", 4, 3), Threads("net", 2, 3)]),
    fused_only=({"e": ensemble("net"), "e__cpu": FUSED, "net": NETWORK}, [Threads("e", 4, 3)]),
    profile=({"net": NETWORK, "net__cpu": NETWORK.replace("3", "9")}, [Threads("net", 2, 9)]),
    # A file `model.onnx` is enough for Triton, which makes two instances of it that share the cores.
    no_config=({"bare": None}, [Threads("bare", 2, max(1, available_cores() // 2))]),
)
def test_budget_counts_every_model_that_runs_a_network(files, budget, make):
    assert thread_budget(make(**files), "cpu") == budget


@cases(
    network=('"net"', '"../net"', "model 'a' names '../net', which is not a folder of the repository"),
    version=('"1"', '"7"', "model 'a' names version 7 of 'net', which is not there"),
    # Every backend ignores this parameter of Triton's.
    missing=('"network"', '"EXECUTION_ENV_PATH"', "model 'a': parameter 'network' is required"),
)
def test_fused_model_without_its_network_is_refused(right, wrong, message, make):
    with pytest.raises(InvalidConfig, match=f"^{re.escape(message)}$"):
        thread_budget(make(a=FUSED.replace(right, wrong), net=NETWORK), "cpu")


def test_threads_beyond_the_cores_are_described():
    cores = available_cores()

    text, fits = repository_index.describe_threads([Threads("a", 2, cores), Threads("b", 0, 9)])

    assert text.startswith(f"{2 * cores} network threads on {cores} cores (a 2x{cores}, b 0x9): instances of")
    assert not fits


@cases(
    none=({}, [10]),
    latest=({"latest": {"num_versions": 2}}, [2, 10]),
    more_than_there_are=({"latest": {"num_versions": 9}}, [1, 2, 10]),
    all=({"all": {}}, [1, 2, 10]),
    specific=({"specific": {"versions": [2, 1]}}, [1, 2]),
)
def test_policy_chooses_the_versions(policy, expected, tmp_path):
    for version in (10, 2, 1):
        (tmp_path / str(version)).mkdir()

    assert repository_index.served_versions(tmp_path, {"version_policy": policy}) == expected
