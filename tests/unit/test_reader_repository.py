"""Readers of text in a repository: what `nereid check` finds, what they pin, and what a profile hides."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nereid.base.assets import STATE, TEXT_REPOSITORY
from nereid.models.publish.network import copy_pinned_model
from nereid.models.publish.remove import find_parts
from nereid.repository import repository_index
from nereid.repository.check import check
from nereid.repository.instance_sizing import Machine, plan_instances
from nereid.repository.repository_index import PinnedModel, readable_configs, steps_of, thread_budget
from tests.tables import cases
from tests.unit.test_check import edit, write

NETWORKS = {"text_detect", "text_direction", "text_recognise"}
FINDERS = [("text_detect", 1), ("text_direction", 1)]
PLAIN, CPU = "read_text_v1/config.pbtxt", "read_text_v1/configs/cpu.pbtxt"
DETECT = "text_detect/config.pbtxt"
PIN = PinnedModel("read_text_v1", "text_recognise", 1, "", 0)


@pytest.fixture
def repository(tmp_path) -> Path:
    return Path(shutil.copytree(TEXT_REPOSITORY, tmp_path / "models", ignore=shutil.ignore_patterns(*STATE)))


def failures(repository: Path) -> str:
    return "\n".join(f"{flaw.model}: {flaw.found}" for flaw in check(repository) if flaw.verdict == "fail")


def test_default_repository_has_no_failures(repository):
    assert failures(repository) == ""


VERSION = '"network_version" value { string_value: "%d" }'
FIRST_STEP, SECOND_STEP = 'string_value: "text_detect"', 'string_value: "text_direction"'
UNSERVED = "{ specific { versions: [ 2 ] } }"
OUTPUT = 'output { name: "probability" data_type: TYPE_FP32 dims: [ -1 ] }\n'
OTHER_INPUTS = "inputs of 'text_direction': expected TYPE_FP32 [3, -1, -1], got "
OTHER_OUTPUTS = "outputs of 'text_recognise': expected TYPE_INT64 [-1], TYPE_FP32 [-1], "
NO_CHARACTERS = "expected the metadata 'character' with one character per line, got none"


def take_other_network(repository: Path) -> None:
    networks = (repository / name / "1" / "model.onnx" for name in ("text_direction", "text_recognise"))
    shutil.copy2(*networks)


@cases(
    version=(edit(CPU, VERSION % 1, VERSION % 9), "names version 9 of 'text_recognise', which is not there"),
    parameter=(edit(CPU, '"in_process"', '"here"'), "expected in_process or served, got 'here'"),
    unserved=(edit(DETECT, "{ all {} }", UNSERVED), "version 1 of 'text_detect' is not served"),
    swapped=(edit(PLAIN, FIRST_STEP, SECOND_STEP), OTHER_INPUTS),
    output=(edit("text_recognise/config.pbtxt", OUTPUT, ""), OTHER_OUTPUTS),
    batches=(edit(DETECT, "batch_size: 8", "batch_size: 0"), "expected max_batch_size 1 or more, got 0"),
    profile=(edit(CPU, SECOND_STEP, FIRST_STEP), "expected version 1 of 'text_direction'"),
    bad_fields=(write("read_waybill_v1/waybill.json", '{"fields": []}'), "waybill.json': "),
    characters=(take_other_network, NO_CHARACTERS),
)
def test_check_finds_what_prevents_a_load(damage, reason, repository):
    damage(repository)

    assert reason in failures(repository)


@pytest.mark.parametrize("profile", ["", "cpu"])
def test_reader_pins_its_recogniser(repository, profile):
    configs = readable_configs(repository, profile)

    assert PIN in repository_index.pinned_models(repository, configs)
    assert steps_of(configs["read_text_v1"]) == [*FINDERS, ("text_recognise", 1)]


def test_networks_in_the_process_are_not_loaded_again(repository):
    """They are models only where the reader sends requests to them."""
    assert repository_index.unused_models(repository, "cpu") == NETWORKS
    assert repository_index.unused_models(repository, "") == set()
    assert {entry.model for entry in thread_budget(repository, "cpu")} == {"read_text_v1", "read_waybill_v1"}
    assert {entry.model for entry in thread_budget(repository, "")} == NETWORKS


def test_readers_share_the_cores(repository):
    roomy, small = (plan_instances(repository, "cpu", Machine(4, gigabytes * 10**9)) for gigabytes in (64, 4))
    assert roomy.counts == {"read_text_v1": 4, "read_waybill_v1": 4}
    # A process takes 680 MB, and half of the memory is for all of them.
    assert (small.counts, small.is_short_of_memory) == ({"read_text_v1": 1, "read_waybill_v1": 1}, True)


def test_copy_for_a_new_recogniser_pins_only_that(repository):
    copy_pinned_model(repository / "read_text_v1", PIN, 2, repository / "read_text_v2")

    for profile in ("", "cpu"):
        document = readable_configs(repository, profile)["read_text_v2"]
        assert steps_of(document) == [*FINDERS, ("text_recognise", 2)]


def test_copy_for_a_waybill_keeps_its_fields(repository):
    pin = PinnedModel("read_waybill_v1", "text_recognise", 1, "", 0)
    copy_pinned_model(repository / "read_waybill_v1", pin, 2, repository / "read_waybill_v2")

    assert (repository / "read_waybill_v2" / "waybill.json").is_file()


@pytest.mark.process
def test_only_reading_itself_needs_the_packages_of_its_extra():
    program = """
import sys
sys.modules["cv2"] = None
import nereid.cli.main, nereid.models.publish.publisher
import nereid.repository.check, nereid.tasks.read.fields.field_search
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_reader_that_the_route_never_called_stays(repository):
    """It runs the same network, but was not made by publishing; the second version was."""
    for name, number in (("read_text_v2", 2), ("invoices", 2)):
        copy_pinned_model(repository / "read_text_v1", PIN, number, repository / name)

    assert find_parts(repository, "read_text").models == ("read_text_v1", "read_text_v2", "read_text")
