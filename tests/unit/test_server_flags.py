"""The server's command line as a stub reads it: both spellings, one backend's settings, the last one wins."""

import json
import subprocess
import sys

import pytest

from nereid.config.server_flags import backend_settings, flag_values

# The words after it are those of a server; its child is a stub.
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
CHILD = """
import json, sys
sys.path[:0] = {path!r}
from nereid.config.server_flags import server_command_line
print(json.dumps(server_command_line()))
"""


def test_stub_reads_the_words_its_parent_was_started_with():
    """Empty words, blanks, and letters of any alphabet arrive one by one, as the parent got them."""
    words = ["--backend-config", "", "onnxruntime,a=b c", "--id=naïve"]
    child = CHILD.format(path=sys.path)

    done = subprocess.run(
        [sys.executable, "-c", PARENT, child, *words], stdout=subprocess.PIPE, check=True, timeout=60
    )

    assert json.loads(done.stdout) == [sys.executable, "-c", PARENT, child, *words]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], []),
        (["tritonserver", "--other=1", "--other", "2"], []),
        (["tritonserver", "--flag=1"], ["1"]),
        (["tritonserver", "--flag", "1"], ["1"]),
        (["tritonserver", "--flag"], []),
        (["tritonserver", "--flag="], [""]),
        (["tritonserver", "--flag=a=b"], ["a=b"]),
        (["tritonserver", "--flagged=1", "--no-flag=2"], []),
        (["tritonserver", "--flag=1", "--other", "--flag=2"], ["1", "2"]),
        (["tritonserver", "--flag", "1", "--flag", "2"], ["1", "2"]),
        (["tritonserver", "--flag=1", "--flag", "2", "x"], ["1", "2"]),
        (["tritonserver", "--flag", "1", "--flag=2"], ["1", "2"]),
    ],
    ids=[
        "no words",
        "other flags",
        "joined",
        "apart",
        "without a value",
        "empty value",
        "equals sign in the value",
        "longer names",
        "joined twice",
        "apart twice",
        "joined then apart",
        "apart then joined",
    ],
)
def test_values_of_a_flag_keep_their_order(words, values):
    """`--flag=VALUE` and `--flag VALUE` are the same, and come back in the order of the command line."""
    assert flag_values(words, "--flag") == values


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ([], {}),
        (["--backend-config=onnxruntime,a=1"], {"a": "1"}),
        (["--backend-config", "onnxruntime,a=1"], {"a": "1"}),
        (["--backend-config=onnxruntime,a=1", "--backend-config=onnxruntime,b=2"], {"a": "1", "b": "2"}),
        (["--backend-config=onnxruntime,a=1", "--backend-config=onnxruntime,a=2"], {"a": "2"}),
        (["--backend-config", "onnxruntime,a=1", "--backend-config", "onnxruntime,a=2"], {"a": "2"}),
        (["--backend-config=onnxruntime,a=1", "--backend-config", "onnxruntime,a=2"], {"a": "2"}),
        (["--backend-config", "onnxruntime,a=1", "--backend-config=onnxruntime,a=2"], {"a": "2"}),
        (["--backend-config=python,a=1", "--backend-config=onnxruntime2,a=2"], {}),
        (["--backend-config=onnxruntime,a=/x=y:/z,w"], {"a": "/x=y:/z,w"}),
        (["--backend-config=onnxruntime,a="], {"a": ""}),
        (["--backend-config=a=1", "--backend-config", "b=2"], {"a": "1", "b": "2"}),
        (["--backend-config=onnxruntime,a=1", "--backend-config=a=2"], {"a": "1"}),
        (["--backend-config=a=/x,onnxruntime,a=2"], {"a": "/x,onnxruntime,a=2"}),
    ],
    ids=[
        "none",
        "joined",
        "apart",
        "two settings",
        "last joined wins",
        "last apart wins",
        "apart after joined wins",
        "joined after apart wins",
        "other backends",
        "value with every separator",
        "empty value",
        "all backends",
        "own setting over all backends",
        "comma in the value for all backends",
    ],
)
def test_settings_are_those_of_one_backend(words, settings):
    """What is meant for this backend wins over what is meant for all, and a later word over an earlier."""
    assert backend_settings(["tritonserver", *words], "onnxruntime") == settings
