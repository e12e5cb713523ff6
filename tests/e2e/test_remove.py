"""Removal, reload and replacement of a user's models on a running server."""

import shutil
import threading
from contextlib import ExitStack

import onnx
import pytest
from PIL import Image

from nereid import Classifier, NereidError
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.base.files import state_folder
from nereid.base.processes import in_background
from nereid.models.publish.add import AddProposal, AddRequest, add
from nereid.models.publish.remove import reload, remove
from nereid.server.model_control import ModelControl
from tests.pictures import save
from tests.publishing import contents, store_published
from tests.routes import WATCHDOG_S, serve_routes, wait_until
from tests.user_networks import UserNetwork

pytestmark = pytest.mark.slow
PHOTO = save(Image.new("RGB", (16, 16), "teal"))
SCALE = {"scale": "0.00392156862745098"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    repository = tmp_path_factory.mktemp("site") / "models"
    store_published(repository)
    with serve_routes(repository, tmp_path_factory.mktemp("run"), "--model-config-name=cpu") as running:
        yield repository, running.server.info()


@pytest.fixture
def file(tmp_path):
    onnx.save(UserNetwork().build(), tmp_path / "network.onnx")
    return tmp_path / "network.onnx"


def test_requests_end_well_while_their_model_is_removed(site, file, tmp_path):
    repository, server_info = site
    add(repository, AddRequest(file, "gone", SCALE, profiles=("cpu",)), server_info)
    outcomes = []

    def send(is_over: threading.Event) -> None:
        with Classifier(server_info.url("grpc"), model="gone") as classifier:
            while not is_over.is_set():
                try:
                    outcomes.append(classifier.classify(PHOTO).labels[0].index)
                except NereidError as error:
                    outcomes.append(str(error))

    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(in_background("sending", send, WATCHDOG_S))
        wait_until(lambda: len(outcomes) > 50)
        remove(repository, "gone", server_info)
        wait_until(lambda: isinstance(outcomes[-1], str))

    answers = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert len(set(answers)) == 1
    assert isinstance(outcomes[0], int)
    assert not [name for name in ModelControl(server_info).ready_versions() if name.startswith("gone")]


def test_model_whose_folder_was_deleted_by_hand(site, file, tmp_path):
    repository, server_info = site
    add(repository, AddRequest(file, "lost", SCALE, profiles=("cpu",)), server_info)
    for name in ("lost", "lost_v1"):
        shutil.rmtree(repository / name)

    assert ModelControl(server_info).config("lost").name == "lost"

    assert remove(repository, "lost", server_info) == ("lost",)

    with Classifier(server_info.url("grpc"), model="lost") as classifier, pytest.raises(NereidError):
        classifier.classify(PHOTO)


def test_refused_replacement_leaves_the_old_model(site, file, tmp_path):
    repository, server_info = site
    add(repository, AddRequest(file, "kept", SCALE, profiles=("cpu",)), server_info)
    with Classifier(server_info.url("grpc"), model="kept") as classifier:
        expected, before = classifier.classify(PHOTO), contents(repository)
        loaded = ModelControl(server_info).ready_versions()
        onnx.save(UserNetwork(weights=2).build(), tmp_path / "other.onnx")
        other = AddRequest(tmp_path / "other.onnx", "kept", SCALE, profiles=("cpu",), is_replacing=True)

        def damage(proposal: AddProposal) -> bool:
            """Break what was examined, so that only the server refuses it."""
            (config,) = state_folder(repository).glob("*/new/kept_v1/configs/cpu.pbtxt")
            config.write_text(config.read_text().replace('"kept_network"', '"nobody"'))
            return True

        with pytest.raises(OperationFailed, match=r"was undone: .*nobody"):
            add(repository, other, server_info, confirm=damage)

        assert contents(repository) == before
        assert ModelControl(server_info).ready_versions() == loaded
        assert classifier.classify(PHOTO).labels == expected.labels


def test_edited_config_is_taken_after_a_reload(site, file, tmp_path):
    repository, server_info = site
    add(repository, AddRequest(file, "edited", SCALE, profiles=("cpu",)), server_info)
    config = repository / "edited_v1" / "configs" / "cpu.pbtxt"
    good = config.read_text()

    config.write_text(good.replace("max_batch_size: 8", "max_batch_size: 4"))
    reload(repository, "edited_v1", server_info)
    assert ModelControl(server_info).config("edited_v1").max_batch_size == 4

    config.write_text(good.replace('"edited_network"', '"nobody"'))
    with pytest.raises(OperationFailed, match="nobody"):
        reload(repository, "edited_v1", server_info)
    with Classifier(server_info.url("grpc"), model="edited_v1") as classifier:
        assert classifier.classify(PHOTO).labels

    with pytest.raises(WrongUsage, match="has no model 'nobody', it has: edited, "):
        reload(repository, "nobody", server_info)
