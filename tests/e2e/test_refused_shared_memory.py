"""Clients of a server that cannot open their shared memory: they send bytes."""

import subprocess
import sys

import pytest

from nereid.assets import COFFEE, REPOSITORY
from nereid.client.classifier import Classifier
from nereid.client.shared_memory import FOLDER, name_prefix
from tests.classifiers import WAYS, check_bytes_are_sent, opened
from tests.e2e.conftest import ESPRESSO
from tests.supervised import serving

PHOTO = COFFEE.read_bytes()
# Another /dev/shm than that of the tests, as in another container.
OWN_FOLDER = 'mount -t tmpfs -o size={} tmpfs /dev/shm; exec "$@"'
CALLER = """
import sys
from nereid.client.classifier import Classifier
with Classifier(sys.argv[1], shared_memory="system") as classifier:
    print(classifier.classify(sys.argv[2]).labels[0].index, classifier.shared_memory_refusal)
"""


def isolated(size: str) -> list[str]:
    """Return the start of a command that has its own /dev/shm."""
    words = ["unshare", "--mount", "--ipc", "sh", "-ec", OWN_FOLDER.format(size), "sh"]
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    return words


def regions() -> set[str]:
    return {path.name for path in FOLDER.glob(f"{name_prefix()}*")}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A server that allows shared memory, and has its own /dev/shm."""
    run = tmp_path_factory.mktemp("elsewhere") / "run"
    with serving(REPOSITORY, run, "--allow-shm", launcher=isolated("1g")) as served:
        yield served


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_server_with_another_folder_gets_bytes(elsewhere, caplog, way):
    before = regions()
    url = f"127.0.0.1:{elsewhere.ports[way[1]]}"
    with opened(way[0], url, way[1], shared_memory="system") as classifier:
        check_bytes_are_sent(classifier, caplog, "the server cannot open the region: it needs this machine's")
        assert regions() == before


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_batches_are_sent_as_bytes_too(elsewhere, protocol):
    url = f"127.0.0.1:{elsewhere.ports[protocol]}"
    with Classifier(url, protocol, shared_memory="system") as classifier:
        outcomes = [*classifier.classify_many([PHOTO, b"not an image", PHOTO], batch_size=3)]

    assert [getattr(each, "labels", [each])[0] for each in outcomes][1].fault == "caller"
    assert [each.labels[0].index for each in (outcomes[0], outcomes[2])] == [ESPRESSO] * 2


def test_full_folder_of_the_client_is_no_error(elsewhere):
    words = [sys.executable, "-c", CALLER, f"127.0.0.1:{elsewhere.ports['grpc']}", str(COFFEE)]

    done = subprocess.run([*isolated("64k"), *words], capture_output=True, text=True, check=True)

    assert done.stdout.startswith(f"{ESPRESSO} [Errno 28] No space left on device: '/dev/shm/nereid-")
    assert "images are sent in requests, not in shared memory" in done.stderr
