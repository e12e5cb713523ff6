"""Staging of a network: its external data, their places, and reserved names."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from nereid.base.errors import OperationFailed
from nereid.models.publish.staged_version import stage
from nereid.repository import onnx_file
from tests.networks import move_out, written
from tests.publishing import contents
from tests.tables import rows


def save(path: Path, location: str) -> Path:
    model = written("(float[N,2] x) => (float[N,2] y) { y = Add(x, w) }", w=np.float32([1, 2]))
    move_out(model.graph.initializer[0], location)
    (path.parent / location).parent.mkdir(parents=True, exist_ok=True)
    (path.parent / location).write_bytes(np.float32([1, 2]).tobytes())
    onnx.save(model, path)
    return path


@rows(
    ("sub/SHA256SUMS", "model.onnx", "another file of the version, 'sub/SHA256SUMS'"),
    ("model.onnx", "model.onnx", "another file of the version, 'model.onnx'"),
    ("./net", "sub/net", "another file of the version, 'net'"),
    ("model.onnx/w.bin", "model.onnx", "another file of the version, 'model.onnx/w.bin'"),
    ("new.onnx", "model.onnx", "another file of the version, 'new.onnx'"),
    (".w.bin", "model.onnx", "external data is a hidden file, '.w.bin'"),
    ("w\n.bin", "model.onnx", "expected a file name for its values"),
)
def test_external_data_must_not_have_names_of_other_files(location, filename, message, tmp_path):
    source = save(tmp_path / "new.onnx", location)

    with pytest.raises(OperationFailed, match=message):
        stage(source, tmp_path / "1", filename)

    assert not (tmp_path / "1").exists()


def test_external_data_is_next_to_the_network(tmp_path):
    """ONNX Runtime reads external data from the network's folder, also below the version folder."""
    stage(save(tmp_path / "new.onnx", "weights/w.bin"), tmp_path / "1", "sub/net.onnx")

    assert [*contents(tmp_path / "1")] == ["sub", "sub/net.onnx", "sub/weights", "sub/weights/w.bin"]
    assert onnx_file.check_external_data(onnx_file.read(tmp_path / "1" / "sub" / "net.onnx")) == 8


@pytest.mark.parametrize("name", ["model.onnx", "other.onnx"])
def test_network_may_be_a_folder_of_its_name(tmp_path, name):
    """Triton also loads `model.onnx/model.onnx`, so a source may be such a folder."""
    (tmp_path / "new" / name).mkdir(parents=True)
    save(tmp_path / "new" / name / "model.onnx", "w.bin")

    stage(tmp_path / "new", tmp_path / "1", "model.onnx")

    assert [*contents(tmp_path / "1")] == ["model.onnx", "w.bin"]
