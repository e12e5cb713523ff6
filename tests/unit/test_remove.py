"""Removal of models from a repository that no server serves."""

import onnx
import pytest

from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.publish.add import AddRequest, add
from nereid.models.publish.publisher import publish
from nereid.models.publish.remove import remove
from nereid.repository.check import check
from tests.publishing import NET, OTHER_ANSWERS, ROUTE, classifier, unchanged, write_route
from tests.routes import variant
from tests.user_networks import UserNetwork

pytestmark = pytest.mark.process


@pytest.fixture
def file(tmp_path):
    onnx.save(classifier(), tmp_path / "new.onnx")
    return tmp_path / "new.onnx"


def request(file, **more) -> AddRequest:
    return AddRequest(file, "small", {"preset": "imagenet"}, **more)


def test_removal_undoes_the_addition(repository, file):
    with unchanged(repository):
        add(repository, request(file), None)
        publish(repository, "small", file, None, OTHER_ANSWERS)

        gone = remove(repository, "small", None)

    assert gone == ("small_network", "small_preprocess", "small_v1", "small_v2", "small")


def test_unreadable_config_of_another_model_does_not_keep_a_model(repository, file):
    add(repository, request(file), None)
    (repository / "torn" / "1").mkdir(parents=True)
    (repository / "torn" / "config.pbtxt").write_text('backend "')

    assert "small" in remove(repository, "small", None)
    assert remove(repository, "torn", None) == ("torn",)


def test_model_that_another_one_needs_stays(repository):
    message = f"cannot remove '{NET}': .* fix: remove or change that first"

    with unchanged(repository), pytest.raises(WrongUsage, match=message):
        remove(repository, NET, None)


def test_pinned_model_of_another_route_stays(repository, file):
    add(repository, request(file), None)
    write_route(repository, variant("v1", "net_v1", 1), variant("other", "small_v1", 0))

    with pytest.raises(WrongUsage, match=f"route '{ROUTE}' sends requests to 'small_v1'"):
        remove(repository, "small", None)


def test_unknown_name_lists_the_known_ones(repository):
    with pytest.raises(WrongUsage, match=r"has no model 'nobody', it has: net, .*"):
        remove(repository, "nobody", None)


def test_replacement(repository, file, tmp_path):
    add(repository, request(file), None)
    publish(repository, "small", file, None, OTHER_ANSWERS)
    onnx.save(UserNetwork().build(), tmp_path / "other.onnx")
    (tmp_path / "labels.txt").write_text("only one\n")

    other = request(tmp_path / "other.onnx", labels=tmp_path / "labels.txt", is_replacing=True)
    with unchanged(repository), pytest.raises(OperationFailed):
        add(repository, other, None)

    add(repository, request(tmp_path / "other.onnx", is_replacing=True), None)
    assert not (repository / "small_v2").exists()
    assert "dims: [ 3, 16, 16 ]" in (repository / "small_network" / "config.pbtxt").read_text()
    assert [each for each in check(repository) if each.verdict == "fail"] == []
