"""The names that `nereid` exports, what its import loads, and commands whose extra is not installed."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib

import pytest

import nereid
from nereid.application.exit_codes import MODULES
from tests.commands import captured
from tests.conftest import ROOT
from tests.tables import rows

PUBLIC = re.findall(
    r"\w+",
    """
AsyncClassifier AsyncDetector AsyncEmbedder AsyncReader Classifier ClassifierError Correction DetectedObject
Detection Detector Embedder Embedding Field Label NereidError Overloaded Prediction Reader Reading
RequestRefused ServerFailed TextLine TimedOut Timings Unavailable Unreachable UnusableImage __version__
""",
)
LOADED = """
import sys
before = set(sys.modules)
import nereid
print(*set(sys.modules) - before)
"""


def test_public_names_are_these_and_resolve():
    assert nereid.__all__ == dir(nereid) == PUBLIC
    assert [name for name in PUBLIC[:-1] if not isinstance(getattr(nereid, name), type)] == []


def test_import_loads_nothing_of_others():
    """Every stub of the server imports `nereid`; only the standard library may come with it."""
    loaded = captured([sys.executable, "-c", LOADED], check=True).stdout.split()

    assert {name.split(".")[0] for name in loaded} - sys.stdlib_module_names == {"nereid"}
    assert [name for name in loaded if name.startswith("nereid.")] == []


pytestmark = pytest.mark.process


@rows(
    ("uvicorn", ["gateway"], "gateway"),
    ("onnx", ["add", "network.onnx", "--name", "mine", "--labels", "labels.txt", "--json"], "publish"),
    ("watchfiles", ["watch", "."], "publish"),
    ("pytriton", ["serve"], "embedded,cpu"),
)
def test_missing_package_is_one_line_with_its_fix(module, words, extra, tmp_path):
    """It names the extra, and no command ends with a traceback."""
    (tmp_path / "network.onnx").write_bytes(b"not read")
    (tmp_path / "labels.txt").write_text("a\nb\n")

    run = "import sys; sys.modules[sys.argv.pop(1)] = None; from nereid.cli.main import main; main()"
    done = captured([sys.executable, "-c", run, module, *words], cwd=tmp_path, timeout=600)

    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert last.endswith(f"; fix: pip install 'nereid-serving[{extra}]'")


def test_gateway_needs_no_packages_of_a_server():
    """As in its image, which has the extra `gateway` only."""
    absent = "import sys; sys.modules |= dict.fromkeys(('onnxruntime', 'onnx', 'pytriton')); "
    used = "import nereid.application.repository_models, nereid.gateway.http.serving"

    done = subprocess.run([sys.executable, "-c", absent + used], capture_output=True, timeout=600)

    assert (done.returncode, done.stderr) == (0, b"")


def test_every_package_of_an_extra_is_known():
    """A package that is added to an extra gets its module in the table."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = importlib.metadata.packages_distributions()
    modules = [module for names in MODULES.values() for module in names]
    known = {re.sub("[-_.]+", "-", name) for module in modules for name in packages[module]}

    required = {re.match("[a-z0-9-]+", requirement)[0] for extra in MODULES for requirement in extras[extra]}

    assert required - {"numpy"} <= known
    # Those of a GPU and of developers; `nereid tune` checks `load` itself.
    assert extras.keys() - MODULES.keys() == {"gpu", "gpu13", "load", "export", "docs", "dev"}
