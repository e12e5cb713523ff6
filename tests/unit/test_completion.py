"""Configs that Triton need not complete."""

from pathlib import Path

import pytest

from nereid.base.assets import REPOSITORY
from nereid.repository.completion import are_complete, why_incomplete
from nereid.repository.layout import model_folders
from tests.networks import tensor
from tests.tables import cases

TENSORS = tensor("input", "x", "FP32", [3]) + tensor("output", "scores", "FP32", [3])
NAME = 'name: "one"\n'
PYTHON = f'{NAME}backend: "python"\n{TENSORS}'
CODE = "class TritonPythonModel: ..."
COMPLETING = "class TritonPythonModel:\n    def auto_complete_config(config): ..."
STEPS = 'ensemble_scheduling { step { model_name: "a" model_version: 1 } }\n'


@pytest.mark.parametrize("profile", ["ensemble", "cpu", "gpu"])
def test_default_models_are_complete(profile):
    """So the default server is back quickly."""
    assert are_complete(REPOSITORY, profile, [folder.name for folder in model_folders(REPOSITORY)])


@cases(
    ("config", "code", "expected"),
    our_backend=(f'{NAME}backend: "onnxruntime"\n{TENSORS}', "", True),
    ensemble=(f'{NAME}platform: "ensemble"\n{TENSORS}{STEPS}', "", True),
    Python=(PYTHON, CODE, True),
    Python_that_completes=(PYTHON, COMPLETING, False),
    Python_with_a_base=(PYTHON, "from base import Base\nclass TritonPythonModel(Base): ...", False),
    Python_from_elsewhere=(PYTHON, "from base import TritonPythonModel", False),
    another_backend=(f'{NAME}backend: "openvino"\n{TENSORS}', "", False),
    backend_from_the_file=(f"{NAME}{TENSORS}", "", False),
    without_a_name=(f'backend: "onnxruntime"\n{TENSORS}', "", False),
    without_tensors=(f'{NAME}backend: "onnxruntime"\n', "", False),
    no_config=(None, "", False),
)
def test_config_is_complete(tmp_path: Path, config, code, expected):
    version = tmp_path / "one" / "1"
    version.mkdir(parents=True)
    if config is not None:
        (version.parent / "config.pbtxt").write_text(config)
    (version / "model.py").write_text(code)

    assert are_complete(tmp_path, "", ["one"]) == expected


def test_unreadable_code_is_named(tmp_path: Path):
    """Python code of another encoding may hide the completion, so the reason says what is expected."""
    version = tmp_path / "one" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(PYTHON)
    (version / "model.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\nclass TritonPythonModel: ...\n")

    assert why_incomplete(tmp_path / "one", "").startswith("its model.py is expected in UTF-8: 'utf-8' codec")
