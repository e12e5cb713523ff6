"""`nereid watch` with a real server: dropped networks are served, or rejected with a reason."""

import os
import threading

import pytest

from nereid.server import run_dir
from tests import routes
from tests.publishing import ONLY_FIRST, added
from tests.watches import SETTLE_S, watching

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    base = tmp_path_factory.mktemp("site")
    repository = base / "repository"
    repository.mkdir()
    routes.store_adding(repository, "net", 1, config=routes.NETWORK + ONLY_FIRST)
    routes.store_router(repository, "route", routes.document(routes.variant("v1", "net", 1)))
    environment = os.environ | {"XDG_RUNTIME_DIR": str(base), "NEREID_REPOSITORY": str(repository)}
    with (
        run_dir.occupy(run_dir.root(environment), repository) as folder,
        routes.serve_routes(repository, folder) as served,
    ):
        run_dir.write(folder, served.server.info())
        yield served, environment


def test_what_is_dropped_is_served_or_rejected(site, tmp_path):
    (served, environment), folder = site, tmp_path
    (folder / ".five").write_bytes(routes.adding(5).SerializeToString())
    (folder / ".six").write_bytes(routes.adding(6).SerializeToString())
    content = routes.adding(4).SerializeToString()
    pace = threading.Event()

    with watching(folder, environment, "--accept-change", "--max-slowdown", "100") as watch:
        with (folder / "route@monday.onnx").open("wb", buffering=0) as file:
            for begin in range(0, len(content), len(content) // 8):
                file.write(content[begin : begin + len(content) // 8])
                pace.wait(SETTLE_S / 3)
        first = "route@monday.onnx: published as version 2 of 'net'"
        watch.wait(first)
        assert added(served.server, "net", "2") == 4

        routes.replace(folder / "net.onnx", content[: len(content) // 2])
        bad = "net.onnx: rejected: "
        watch.wait(first, bad)

        (folder / "net@link.onnx").symlink_to(folder / ".five")
        second = "net@link.onnx: published as version 3 of 'net'"
        watch.wait(first, bad, second)
        (folder / ".new").symlink_to(folder / ".six")
        (folder / ".new").replace(folder / "net@link.onnx")
        third = "net@link.onnx: published as version 4 of 'net'"
        watch.wait(first, bad, second, third)

    assert [added(served.server, "net", version) for version in "1234"] == [1, 4, 5, 6]
    assert served.send("route").added == 1
    assert (folder / "published" / "route@monday-v2.onnx").read_bytes() == content
    ((reason,), (rejected,)) = ([*folder.glob(f"rejected/net-{end}")] for end in ("*.txt", "*Z.onnx"))
    assert watch.announced[1] == f"net.onnx: rejected: {reason.read_text()}"
    assert rejected.read_bytes() == content[: len(content) // 2]
