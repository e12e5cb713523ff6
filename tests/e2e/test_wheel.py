"""The distribution as a user gets it: sdist and wheel, in an empty environment, outside the checkout."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from nereid.base.assets import COFFEE
from tests.commands import captured
from tests.conftest import ROOT
from tests.environments import TIMEOUT_S, Environment

pytestmark = pytest.mark.nightly(minutes=2)

STOP_S = 180
# Names that other distributions own, or that hold no product code.
FOREIGN = {"clients", "loadtest", "ops", "python_backend", "tests", "tools"}


def interpreter(version: str) -> str:
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for program in (*versions.glob(f"{version}.*/bin/python3"), f"python{version}"):
        check = [str(program), str(ROOT / "nereid" / "server" / "preflight.py")]
        if shutil.which(program) and subprocess.run(check, capture_output=True).returncode == 0:
            return str(program)
    pytest.skip(f"needs Python {version} with its shared library; fix: apt-get install libpython{version}")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    done = captured([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return folder


@pytest.fixture(scope="module", params=["3.11", "3.12"])
def installed(request, built, tmp_path_factory):
    python = interpreter(request.param)
    base = tmp_path_factory.mktemp("user")
    (base / "empty").mkdir()
    installed = Environment(base / "venv", base / "empty")
    subprocess.run([python, "-m", "venv", str(installed.path)], check=True, timeout=TIMEOUT_S)
    (wheel,) = built.glob("*.whl")
    installed.run(
        "pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[embedded,cpu,publish]"
    )
    yield installed
    shutil.rmtree(installed.path)


def test_wheel_owns_one_package(built):
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith("nereid_serving-")

    names = zipfile.ZipFile(wheel).namelist()

    assert {name.split("/")[0].partition("-")[0] for name in names} == {"nereid", "nereid_serving"}
    assert "nereid/py.typed" in names
    assert "nereid/data/python_backend/onnxruntime/model.py" in names
    assert [name for name in names if ".nereid" in name or name.endswith((".pyc", "tuned.pbtxt"))] == []


def test_sdist_has_what_the_wheel_is_built_from(built):
    """The wheel here was built from the sdist, which has the sources and no other room of the checkout."""
    (sdist,) = built.glob("*.tar.gz")

    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}

    assert {"nereid", "python_backend", "model_repository", "clients", "pyproject.toml"} <= tops
    assert not tops & (FOREIGN - {"clients", "python_backend"})


def test_demo_and_check_run_in_an_empty_folder(installed):
    version = installed.run("pip", "show", "nereid-serving").split("Version: ")[1].split()[0]

    assert version in installed.run("nereid", "--version")
    assert installed.run("nereid", "demo").count("espresso") == 2
    findings = json.loads(installed.run("nereid", "check", "--json"))
    assert {finding["verdict"] for finding in findings} == {"ok"}
    assert list(installed.folder.iterdir()) == []


def test_own_repository_is_served_and_classifies(installed, tmp_path):
    installed.run("nereid", "init", repository := tmp_path / "own")
    words = ("serve", "--repository", repository, "--http-port=0", "--grpc-port=0", "--metrics-port=0")
    code = (
        "import sys; from nereid import Classifier\n"
        "with Classifier(sys.argv[1]) as c: print(c.classify(sys.argv[2], top_k=1).labels[0].name)"
    )
    with installed.announcing(tmp_path / "log", "nereid", *words) as (server, ports):
        assert installed.run("python", "-c", code, f"127.0.0.1:{ports['grpc']}", COFFEE) == "espresso\n"
        server.terminate()
        assert server.wait(STOP_S) == 0
