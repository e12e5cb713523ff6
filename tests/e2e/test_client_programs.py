"""The short programs in `clients/`, each run as a user runs it, against the real server."""

import json
import shutil
import sys

import pytest

from nereid.base.assets import CHELSEA, COFFEE
from tests.commands import captured
from tests.e2e.conftest import url
from tests.labels import LABEL, WORDS
from tests.tables import cases

PYTHON = sys.executable


def output_of(root, *words) -> str:
    done = captured([*map(str, words)], cwd=root, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@cases(
    http=((PYTHON, "clients/python_http.py", COFFEE), "http"),
    grpc=((PYTHON, "clients/python_grpc.py", COFFEE), "grpc"),
    shared_memory=((PYTHON, "clients/python_shared_memory.py", COFFEE), "grpc"),
    javascript=(("node", "clients/javascript.mjs", COFFEE), "http"),
)
def test_program_prints_the_class_of_the_photo(words, protocol, root, fused):
    if not shutil.which(words[0]):
        pytest.skip(f"needs {words[0]}; fix: apt-get install {words[0]}js")

    best, *others = output_of(root, *words, url(fused, protocol)).splitlines()

    # v1 gives 0.953; v2 (INT8) 0.948, and 0.920 on a CPU without VNNI.
    assert 0.9 < float(best.split()[0]) < 1
    assert "espresso (class 967, variant v" in best
    assert len(others) == 2


def test_curl_program_prints_the_servers_json(root, fused):
    """No client library at all: curl and a shell."""
    response = json.loads(output_of(root, "clients/http_curl.sh", COFFEE, url(fused, "http")))

    scores = next(output for output in response["outputs"] if output["name"] == "scores")
    assert scores["data"][0].endswith(":967:espresso")


def test_grpc_program_chooses_the_variant(root, fused):
    lines = output_of(root, PYTHON, "clients/python_grpc.py", COFFEE, url(fused, "grpc"), "v2").splitlines()

    assert lines[0].endswith("espresso (class 967, variant v2, version 2, variant)")


def test_asyncio_program_reports_each_image(root, fused, tmp_path):
    damaged = tmp_path / "damaged.jpg"
    damaged.write_bytes(b"not an image")

    program = (PYTHON, "clients/python_asyncio.py", url(fused, "grpc"))
    coffee, failed, cat = output_of(root, *program, COFFEE, damaged, CHELSEA).splitlines()

    assert coffee.startswith(f"{COFFEE}: espresso 0.9")
    assert failed.startswith(f"{damaged}: failed: ")
    assert "invalid image" in failed
    assert cat.startswith(f"{CHELSEA}: ")
    assert "cat" in cat


def test_every_program_is_in_the_docs_and_in_a_test(root):
    """A program that no page names, or that no test runs, goes stale."""
    programs = {path.name for path in (root / "clients").iterdir() if path.is_file()}
    page = (root / "docs" / "clients.md").read_text()
    tests = (root / "tests/e2e" / "test_client_programs.py").read_text()

    assert len(programs) >= 6
    assert [name for name in programs if f"clients/{name}" not in page] == []
    assert [name for name in programs if f"clients/{name}" not in tests] == []


def test_read_program_prints_the_lines(root, text_server, tmp_path):
    (tmp_path / "label.png").write_bytes(LABEL)

    program = (PYTHON, "clients/python_read.py", tmp_path / "label.png", url(text_server, "http"))
    lines = output_of(root, *program).splitlines()

    assert [line.split(" ", 1)[1].partition(" (from ")[0] for line in lines] == WORDS
