"""Bounds of the number of instances in a model's config."""

import pytest

from nereid.base.config.instance_bounds import InstanceBounds, chosen, read_bounds, with_chosen
from nereid.base.serving_errors import InvalidConfig
from tests.tables import cases

GROUP = {"kind": "KIND_CPU", "count": 2}
EXPECTED = "expected LOW-HIGH with 1 <= LOW <= HIGH <= 64"


def document(bounds: str | None = "1-4", idle_s: str = "", **more) -> dict:
    texts = {"preset": "imagenet", "nereid.instances": bounds, "nereid.instances_idle_s": idle_s}
    parameters = {name: {"string_value": text} for name, text in texts.items() if text}
    return {"name": "net", "instance_group": [GROUP], "parameters": parameters, **more}


def test_bounds_and_idle_time_are_read():
    assert read_bounds(document("1-4")) == InstanceBounds(1, 4, 30.0)
    assert read_bounds(document(" 2-2 ", "1.5")) == InstanceBounds(2, 2, 1.5)
    assert read_bounds(document(None, "1.5")) is None
    assert read_bounds({}) is None


@cases(
    ("config", "message"),
    {
        "no range": (document("4"), f"parameter 'nereid.instances': {EXPECTED}, such as \"1-4\", got '4'"),
        "reversed": (document("4-1"), "got '4-1'"),
        "zero": (document("0-4"), "got '0-4'"),
        "too many": (document("1-65"), "got '1-65'"),
        "a served number": (document("3 of 1-4"), "got '3 of 1-4'"),
        "other digits": (document("١-٤"), EXPECTED),
        "two groups": (document(instance_group=[GROUP, GROUP]), "expected at most 1 instance_group, got 2"),
        "an ensemble": (document(ensemble_scheduling={}), "expected a model with instances, got an ensemble"),
        "idle for no time": (document(idle_s="0"), "expected a number of seconds above 0, got '0'"),
    },
)
def test_invalid_bounds_are_named(config, message):
    with pytest.raises(InvalidConfig) as caught:
        read_bounds(config)

    assert message in str(caught.value)


@cases(("wanted", "count"), {"below": (0, 1), "inside": (3, 3), "above": (9, 4)})
def test_chosen_number_is_within_the_bounds(wanted, count):
    """Only the number and the parameter change, so that Triton starts all instances anew."""
    config = document()

    found = with_chosen(config, InstanceBounds(1, 4), wanted)

    text = f"{count} of 1-4"
    parameters = {**config["parameters"], "nereid.instances": {"string_value": text}}
    assert found == {**config, "instance_group": [{**GROUP, "count": count}], "parameters": parameters}
    assert [chosen(each) for each in (text, "", "1-4", "x of 1-4")] == [count, None, None, None]
    assert config == document()
    del config["instance_group"]
    assert with_chosen(config, InstanceBounds(1, 4), wanted)["instance_group"] == [{"count": count}]
