"""The server's command line as a stub reads it: both spellings, one backend's settings, the last one wins."""

import json
import subprocess
import sys

from nereid.base.config.server_flags import backend_settings, flag_values
from tests.tables import cases

OURS = "--backend-config=onnxruntime,a="
# The words after it are those of a server; its child is a stub.
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
CHILD = """
import json, sys
sys.path[:0] = {path!r}
from nereid.base.config.server_flags import server_command_line
print(json.dumps(server_command_line()))
"""


def test_stub_reads_the_words_its_parent_was_started_with():
    words = ["--backend-config", "", "onnxruntime,a=b c", "--id=naïve"]
    child = CHILD.format(path=sys.path)

    done = subprocess.run(
        [sys.executable, "-c", PARENT, child, *words], stdout=subprocess.PIPE, check=True, timeout=60
    )

    assert json.loads(done.stdout) == [sys.executable, "-c", PARENT, child, *words]


@cases(
    ("words", "values"),
    {
        "without a value": (["tritonserver", "--flag"], []),
        "empty value": (["tritonserver", "--flag="], [""]),
        "equals sign in the value": (["tritonserver", "--flag=a=b"], ["a=b"]),
        "longer names": (["tritonserver", "--flagged=1", "--no-flag=2"], []),
        "joined then apart": (["tritonserver", "--flag=1", "--flag", "2", "x"], ["1", "2"]),
        "apart then joined": (["tritonserver", "--flag", "1", "--flag=2"], ["1", "2"]),
    },
)
def test_values_of_a_flag_keep_their_order(words, values):
    assert flag_values(words, "--flag") == values


@cases(
    ("words", "settings"),
    {
        "last wins": ([OURS + "1", "--backend-config", "onnxruntime,a=2"], {"a": "2"}),
        "other backends": (["--backend-config=python,a=1", "--backend-config=onnxruntime2,a=2"], {}),
        "value with every separator": ([OURS + "/x=y:/z,w"], {"a": "/x=y:/z,w"}),
        "empty value": ([OURS], {"a": ""}),
        "all backends": (["--backend-config=a=1", "--backend-config", "b=2"], {"a": "1", "b": "2"}),
        "own setting over all backends": ([OURS + "1", "--backend-config=a=2"], {"a": "1"}),
        "comma in the value": (["--backend-config=a=/x,onnxruntime,a=2"], {"a": "/x,onnxruntime,a=2"}),
    },
)
def test_settings_are_those_of_one_backend(words, settings):
    assert backend_settings(["tritonserver", *words], "onnxruntime") == settings
