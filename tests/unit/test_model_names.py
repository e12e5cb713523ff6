"""The models that `nereid classify` and `nereid gateway` use, and the names that the gateway offers."""

import io

import pytest
from PIL import Image

from nereid.application.chosen_models import find_any_model, find_model
from nereid.application.repository_models import RepositoryModels
from nereid.base.assets import COFFEE, REPOSITORY, TEXT_REPOSITORY
from nereid.base.errors import WrongUsage
from nereid.base.task import Task
from nereid.gateway.failures import Failure
from nereid.tasks.classify import CLASSIFY
from nereid.tasks.read import READ
from nereid.tasks.read.endpoint import fields_of
from tests.tables import cases

ROUTE = """backend: "ab_router"
parameters { key: "route" value { string_value: "NAME.route.json" } }
"""
ROUTES = {"cats": ROUTE, "dogs": ROUTE}
PINNED = """platform: "ensemble"
input { name: "image" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 2 ] }
"""
NETWORK = PINNED.replace('"image"', '"pixels"')
OUTPUT = 'output {{ name: "{}" data_type: TYPE_FP32 dims: [ -1 ] }}'
READER = PINNED.replace('"scores"', '"text"') + OUTPUT.format("confidence") + OUTPUT.format("box")
DETECTOR = PINNED.replace('"scores"', '"box"') + OUTPUT.format("score") + OUTPUT.format("label")


def repository(folder, **configs):
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.pbtxt").write_text(config)
    return folder


@cases(
    classify=(CLASSIFY, {"classify": ROUTE, "dogs": ROUTE}, "", "classify"),
    only_route=(CLASSIFY, {"dogs": ROUTE, "dogs_v1": PINNED, "dogs_network": NETWORK}, "", "dogs"),
    named=(CLASSIFY, {"dogs": ROUTE, "dogs_v1": PINNED}, "dogs_v1", "dogs_v1"),
    no_route=(CLASSIFY, {"pinned": PINNED, "network": NETWORK, "broken": "{"}, "", "pinned"),
    unknown=(CLASSIFY, {"dogs": ROUTE}, "cats", "has no model 'cats'; expected one of: dogs"),
    several=(CLASSIFY, ROUTES, "", "has several models; fix: name one with --model: "),
    none=(CLASSIFY, {"network": NETWORK}, "", "has no model with input 'image' and output 'scores'"),
    reader=(READ, {"read": READER, "dogs": ROUTE}, "", "read"),
    any_of_several=(None, ROUTES, "", "cats"),
    any_the_default=(None, {"labels": READER, "read_text": READER, "cars": DETECTOR}, "", "read_text"),
    any_classifier_first=(None, {"my_classifier": ROUTE, "read_text": READER}, "", "my_classifier"),
    any_named=(None, {"cats": ROUTE, "cars": DETECTOR}, "cars", "cars"),
    any_unknown=(
        None,
        {"pages": READER, "cars": DETECTOR, "cats": ROUTE, "network": NETWORK},
        "dogs",
        "has no model 'dogs'; expected one of: cats, cars, pages",
    ),
    any_network=(None, {"network": NETWORK}, "", "network"),
    empty=(None, {}, "", "has no model; fix: nereid add FILE"),
)
def test_default_model(kind: Task | None, configs, name, expected, tmp_path):
    """Without a kind, the model is one of any task."""
    folder = repository(tmp_path, **configs)
    try:
        outcome = find_model(folder, name, kind) if kind else find_any_model(folder, name)
    except WrongUsage as error:
        outcome = str(error)

    assert outcome == expected or outcome.startswith(f"'{folder}' {expected}")


def test_gateway_offers_routes_and_the_default_model(tmp_path):
    folder = repository(tmp_path, dogs=ROUTE, dogs_v1=PINNED)
    models = RepositoryModels(folder, lambda: None, ["dogs_v1"])

    assert models.names() == ["dogs_v1", "dogs"]
    repository(folder, cats=ROUTE)
    assert models.names() == ["dogs_v1", "cats", "dogs"]
    assert [models.route(name) is not None for name in ("dogs", "dogs_v1", "birds")] == [True, False, False]


def test_preview_is_that_of_the_preprocessing():
    models, photo = RepositoryModels(REPOSITORY, lambda: None), COFFEE.read_bytes()

    preview = models.preview("classify", photo)

    with Image.open(io.BytesIO(preview)) as picture:
        assert picture.size == (224, 224)
    assert models.preview("classify_v1", photo) == preview
    assert models.preview("efficientnet_lite0", photo) is None
    with pytest.raises(Failure, match="expected an image file"):
        models.preview("classify", b"text")


@cases("name", route="read_waybill", its_variant="read_waybill_v1")
def test_fields_are_those_of_the_default_variant(name):
    models = RepositoryModels(TEXT_REPOSITORY, lambda: None)

    fields = {field.name: field for field in fields_of(models.config(name))}

    assert (fields["tracking_number"].required, fields["weight"].required) == (True, False)
    assert [fields_of(models.config(other)) for other in ("read_text", "text_detect")] == [[], []]
    assert models.config("none") is None
