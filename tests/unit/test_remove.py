"""Removal of models from a repository that no server serves."""

import onnx
import pytest

from nereid.base import files
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.publish.add import AddRequest, add
from nereid.models.publish.publisher import publish
from nereid.models.publish.remove import remove
from nereid.models.routes.location import find_route, read_route_file
from nereid.repository.check import check
from tests.fake_server import FakeServer, running
from tests.publishing import NET, OTHER_ANSWERS, ROUTE, classifier, contents, unchanged, write_route
from tests.routes import variant
from tests.tables import cases
from tests.user_networks import UserNetwork

pytestmark = pytest.mark.process
UNDONE = r"was undone: .* out of memory"


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


class Picky(FakeServer):
    """Refuses one load: the one that makes `accepted` negative; and all loads of `refused`."""

    accepted, refused = 10**6, ""

    def _load(self, model: str) -> None:
        self.accepted -= 1
        if self.accepted == -1 or model == self.refused:
            raise OperationFailed("out of memory")
        super()._load(model)


@pytest.fixture
def other(tmp_path):
    onnx.save(UserNetwork().build(), tmp_path / "other.onnx")
    return tmp_path / "other.onnx"


@pytest.mark.parametrize("accepted", range(4))
def test_refused_replacement_leaves_the_old_model(accepted, repository, file, other):
    """Whichever new model is refused, files, route and versions stay, on the disk and in the server."""
    add(repository, request(file), None)
    publish(repository, "small", file, None, OTHER_ANSWERS)
    server, before = Picky(repository), contents(repository)
    was, server.accepted = (dict(server.loaded), dict(server.configs)), accepted

    with running(server) as server_info, pytest.raises(OperationFailed, match=UNDONE):
        add(repository, request(other, is_replacing=True), server_info)

    assert contents(repository) == before
    assert (server.loaded, server.configs) == was
    assert read_route_file(find_route(repository, "small")).sha256 in server.page()
    assert {path.name for path in files.state_folder(repository).iterdir()} == {"journal.jsonl", "reserve"}


def test_refused_old_model_is_reported_after_a_refused_replacement(repository, file, other):
    """It may never have been loaded, so it does not keep the next command from running."""
    add(repository, request(file), None)
    server, before, lines = Picky(repository), contents(repository), []
    server.refused = "small"

    with running(server) as server_info:
        with pytest.raises(OperationFailed, match=UNDONE):
            add(repository, request(other, is_replacing=True), server_info, lines.append)
        assert contents(repository) == before
        assert {"small_network", "small_v1"} <= server.loaded.keys()
        (line,) = [line for line in lines if line.startswith("small: cannot be loaded again: ")]
        assert line.endswith("out of memory; fix: nereid reload small")
        assert "small" in remove(repository, "small", server_info)


def test_unreadable_config_of_another_model_does_not_keep_a_model(repository, file):
    add(repository, request(file), None)
    (repository / "torn" / "1").mkdir(parents=True)
    (repository / "torn" / "config.pbtxt").write_text('backend "')

    assert "small" in remove(repository, "small", None)
    assert remove(repository, "torn", None) == ("torn",)


@cases(
    of_another_model=(NET, f"cannot remove '{NET}': .* fix: remove or change that first"),
    unknown=("nobody", r"has no model 'nobody', it has: net, .*"),
)
def test_model_that_cannot_be_removed_changes_nothing(name, message, repository):
    with unchanged(repository), pytest.raises(WrongUsage, match=message):
        remove(repository, name, None)


def test_pinned_model_of_another_route_stays(repository, file):
    add(repository, request(file), None)
    write_route(repository, variant("v1", "net_v1", 1), variant("other", "small_v1", 0))

    with pytest.raises(WrongUsage, match=f"route '{ROUTE}' sends requests to 'small_v1'"):
        remove(repository, "small", None)


def test_replacement(repository, file, other, tmp_path):
    add(repository, request(file), None)
    publish(repository, "small", file, None, OTHER_ANSWERS)
    (tmp_path / "labels.txt").write_text("only one\n")

    with unchanged(repository), pytest.raises(OperationFailed):
        add(repository, request(other, labels=tmp_path / "labels.txt", is_replacing=True), None)

    add(repository, request(other, is_replacing=True), None)
    assert not (repository / "small_v2").exists()
    assert {path.name for path in files.state_folder(repository).iterdir()} == {"journal.jsonl", "reserve"}
    assert "dims: [ 3, 16, 16 ]" in (repository / "small_network" / "config.pbtxt").read_text()
    assert [finding for finding in check(repository) if finding.verdict == "fail"] == []
