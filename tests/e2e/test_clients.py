"""The classifiers against the real server: equal results over every transport, and no leftovers."""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from nereid.base.assets import COFFEE, REPOSITORY
from nereid.client.shared_memory import SHM_FOLDER, Region, name_prefix
from tests.classifiers import WAYS, check_bytes_are_sent, opened
from tests.e2e.conftest import ESPRESSO, url
from tests.networks import connect
from tests.routes import wait_until
from tests.supervised import image_input, serving

TRANSPORTS = [(*way, memory) for way in WAYS for memory in (None, "system")]
PHOTO = COFFEE.read_bytes()


def known(server) -> set[str]:
    with connect(server) as client:
        return {*client.get_system_shared_memory_status(as_json=True).get("regions", {})}


def files(names: set[str]) -> set[str]:
    """Return the regions among `names` that are on this machine."""
    return {name for name in names if (SHM_FOLDER / name).exists()}


def files_of(server) -> set[str]:
    names = known(server)
    assert files(names) == names
    return names


def test_transports_give_equal_scores(fused):
    with connect(fused) as client:
        plain = client.infer("classify_v2", [image_input("grpc", PHOTO)]).as_numpy("scores")[0]

    for way, protocol, memory in TRANSPORTS:
        with opened(way, url(fused, protocol), protocol, "classify_v2", shared_memory=memory) as classifier:
            scores = classifier.scores(PHOTO)
            regions = files_of(fused)
        assert bool(regions) == bool(memory)
        assert not known(fused) | files(regions)
        np.testing.assert_array_equal(scores, plain, f"{way} {protocol} {memory}", strict=True)


@pytest.mark.parametrize(("way", "protocol"), WAYS)
def test_server_that_does_not_allow_shared_memory_gets_bytes(both_profiles, caplog, way, protocol):
    address = url(both_profiles["ensemble"], protocol)
    with opened(way, address, protocol, shared_memory="system") as classifier:
        check_bytes_are_sent(classifier, caplog, "fix: nereid serve --allow-shm")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    mount = 'mount -t tmpfs -o size=1g tmpfs /dev/shm; exec "$@"'
    launcher = ["unshare", "--mount", "--ipc", "sh", "-ec", mount, "sh"]
    if subprocess.run([*launcher, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    run = tmp_path_factory.mktemp("elsewhere") / "run"
    with serving(REPOSITORY, run, "--allow-shm", launcher=launcher) as served:
        yield served


@pytest.mark.parametrize(("way", "protocol"), WAYS)
def test_server_with_another_folder_gets_bytes(elsewhere, caplog, way, protocol):
    before = {*SHM_FOLDER.glob(f"{name_prefix()}*")}
    address = f"127.0.0.1:{elsewhere.ports[protocol]}"
    with opened(way, address, protocol, shared_memory="system") as classifier:
        check_bytes_are_sent(classifier, caplog, "the server cannot open the region: it needs this machine's")
        assert {*SHM_FOLDER.glob(f"{name_prefix()}*")} == before
        good, bad, _ = classifier.classify_many([PHOTO, b"not an image", PHOTO], batch_size=3)

    assert (good.labels[0].index, bad.fault) == (ESPRESSO, "caller")


def test_server_does_not_release_a_region_that_it_reads(fused):
    """The safety of regions depends on this: Triton does not release one while a request uses it."""
    region = Region("system", 2**20)
    region.write([len(PHOTO).to_bytes(4, "little"), PHOTO] * 8)
    tensor = tritonclient.grpc.InferInput("image", [8, 1], "BYTES")
    tensor.set_shared_memory(region.name, 8 * (4 + len(PHOTO)))

    def release() -> str:
        try:
            client.unregister_system_shared_memory(region.name)
        except InferenceServerException as error:
            return error.message()
        return ""

    refusals = []
    with connect(fused) as client, ThreadPoolExecutor(1) as pool:
        for pause_s in (0.005, 0.01, 0.02, 0.05, 0.1):  # until the server runs the request
            client.register_system_shared_memory(*region.registration)
            request = pool.submit(client.infer, "classify_v2", [tensor], client_timeout=60)
            time.sleep(pause_s)
            refusals.append(release())
            request.exception()
            wait_until(lambda: not release())  # the response may arrive before the release works
    region.destroy()

    assert any("currently in use" in refusal for refusal in refusals)
