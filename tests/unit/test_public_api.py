"""The names that `nereid` exports, and the modules that its import loads."""

import json
import re
import subprocess
import sys

import nereid

PUBLIC = re.findall(
    r"\w+",
    """
AsyncClassifier AsyncDetector AsyncEmbedder AsyncReader Classifier ClassifierError Correction
DetectedObject Detection Detector Embedder Embedding Field Label Overloaded Prediction Reader Reading
RequestRefused ServerFailed TextLine TimedOut Timings Unavailable Unreachable UnusableImage __version__
""",
)
LOADED = """
import sys
before = set(sys.modules)
import nereid
loaded = sorted(set(sys.modules) - before)
import json
print(json.dumps(loaded))
"""


def test_public_names_are_these_and_resolve():
    assert nereid.__all__ == dir(nereid) == PUBLIC
    assert [name for name in PUBLIC[:-1] if not isinstance(getattr(nereid, name), type)] == []


def test_import_loads_nothing_of_others():
    """Every stub of the server imports `nereid`; only the standard library may come with it."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)

    tops = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert tops - sys.stdlib_module_names == {"nereid"}
    assert [name for name in json.loads(done.stdout) if name.startswith("nereid.")] == []
