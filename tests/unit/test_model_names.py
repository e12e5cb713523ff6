"""The model that `nereid classify` and `nereid gateway` use, and the names that the gateway offers."""

import io

import pytest
from PIL import Image

from nereid.assets import COFFEE, REPOSITORY
from nereid.cli.options import CLASSIFIERS, READERS, find_any_model, find_model
from nereid.cli.route_commands.gateway_route import RepositoryModels
from nereid.errors import WrongUsage
from nereid.gateway.models import PreviewRefused
from tests.tables import cases

ROUTE = """backend: "ab_router"
parameters { key: "route" value { string_value: "NAME.route.json" } }
"""
PINNED = """platform: "ensemble"
input { name: "image" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 2 ] }
"""
NETWORK = PINNED.replace('"image"', '"pixels"')
READER = PINNED.replace('"scores"', '"text"') + "".join(
    f'output {{ name: "{name}" data_type: TYPE_FP32 dims: [ -1 ] }}' for name in ("confidence", "box")
)


def repository(folder, **configs):
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.pbtxt").write_text(config)
    return folder


@cases(
    ("configs", "name", "expected"),
    {
        "classify": ({"classify": ROUTE, "dogs": ROUTE}, "", "classify"),
        "only route": ({"dogs": ROUTE, "dogs_v1": PINNED, "dogs_network": NETWORK}, "", "dogs"),
        "named": ({"dogs": ROUTE, "dogs_v1": PINNED}, "dogs_v1", "dogs_v1"),
        "no route": ({"pinned": PINNED, "network": NETWORK, "broken": "{"}, "", "pinned"),
        "unknown": ({"dogs": ROUTE}, "cats", "has no model 'cats'; expected one of: dogs"),
        "several": ({"cats": ROUTE, "dogs": ROUTE}, "", "has several models; fix: name one with --model: "),
        "none": ({"network": NETWORK}, "", "has no model with input 'image' and output 'scores'"),
    },
)
def test_default_model(tmp_path, configs, name, expected):
    folder = repository(tmp_path, **configs)
    try:
        found = find_model(folder, name, CLASSIFIERS)
    except WrongUsage as error:
        found = str(error)

    assert found == expected or found.startswith(f"'{folder}' {expected}")


def test_model_is_chosen_by_its_outputs(tmp_path):
    folder = repository(tmp_path, labels=READER, pages=READER)
    with pytest.raises(WrongUsage, match="fix: name one with --model: labels, pages"):
        find_any_model(folder, "")
    assert find_any_model(folder, "pages") == "pages"
    (folder / "pages" / "config.pbtxt").unlink()

    assert find_model(folder, "", READERS) == find_any_model(folder, "") == "labels"


def test_gateway_offers_routes_and_the_default_model(tmp_path):
    folder = repository(tmp_path, dogs=ROUTE, dogs_v1=PINNED)
    models = RepositoryModels(folder, lambda: None, ["dogs_v1"])

    assert models.names() == ["dogs_v1", "dogs"]
    repository(folder, cats=ROUTE)
    assert models.names() == ["dogs_v1", "cats", "dogs"]
    assert [models.route(name) is not None for name in ("dogs", "dogs_v1", "birds")] == [True, False, False]


def test_preview_is_that_of_the_preprocessing():
    models, photo = RepositoryModels(REPOSITORY, lambda: None), COFFEE.read_bytes()

    found = models.preview("classify", photo)

    with Image.open(io.BytesIO(found)) as picture:
        assert picture.size == (224, 224)
    assert models.preview("classify_v1", photo) == found
    assert models.preview("efficientnet_lite0", photo) is None
    with pytest.raises(PreviewRefused, match="expected an image file"):
        models.preview("classify", b"text")
