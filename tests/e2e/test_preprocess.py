"""Preprocessing models that consist of a config.pbtxt, on the real server."""

import io

import numpy as np
import pytest
from PIL import Image

from nereid.assets import CHELSEA, COFFEE
from tests.networks import infer, parameter, serve
from tests.pictures import save

IMAGE = 'input { name: "image" data_type: TYPE_STRING dims: [ 1 ] }\n'
# Name, output and parameters of each model.
MODELS = {
    "clip_half": ("TYPE_FP16 dims: [ 3, 224, 224 ]", {"preset": "clip"}),
    "detector": (
        "TYPE_UINT8 dims: [ 640, 640, 3 ]",
        {"preset": "letterbox", "layout": "NHWC", "FORCE_CPU_ONLY_INPUT_TENSORS": "no"},
    ),
}
CLIP_MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
CLIP_STD = np.array([0.26862954, 0.26130258, 0.27577711])


def config(output: str, parameters: dict[str, str]) -> str:
    lines = [parameter(*each) for each in parameters.items()]
    output = f'output {{ name: "pixels" data_type: {output} }}\n'
    return f'backend: "preprocess" max_batch_size: 4 dynamic_batching {{}}\n{IMAGE}{output}{"".join(lines)}'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    for name, (output, parameters) in MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config(output, parameters))
    with serve(repository, tmp_path_factory.mktemp("run")) as running:
        yield running


def clip_half(image: Image.Image) -> np.ndarray:
    """Apply CLIP's own transform, in half precision."""
    width, height = (int(224 * side / min(image.size)) for side in image.size)
    left, top = round((width - 224) / 2), round((height - 224) / 2)
    image = image.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + 224, top + 224))
    pixels = (np.asarray(image) / 255 - CLIP_MEAN) / CLIP_STD
    return pixels.transpose(2, 0, 1).astype(np.float16)


def detector(image: Image.Image) -> np.ndarray:
    """Resize to fit 640 x 640 and pad with grey, as YOLO's letterbox does."""
    ratio = 640 / max(image.size)
    image = image.resize([round(side * ratio) for side in image.size], Image.Resampling.BILINEAR)
    canvas = Image.new("RGB", (640, 640), (114, 114, 114))
    canvas.paste(image, ((640 - image.width) // 2, (640 - image.height) // 2))
    return np.asarray(canvas)


def png(photo: bytes) -> tuple[bytes, Image.Image]:
    """Store a photo without loss, so that no decoder may differ."""
    image = Image.open(io.BytesIO(photo)).convert("RGB")
    return save(image), image


@pytest.mark.parametrize("reference", [clip_half, detector], ids=lambda each: each.__name__)
def test_model_without_code_agrees_with_pillow(server, reference):
    """A batch of two photos of different sizes equals the results of Pillow and NumPy, datatype included.

    One pixel in a hundred may differ by a level: Pillow rounds halves up, NumPy to even. Half precision adds
    5 % of a level.
    """
    files, images = zip(*(png(photo.read_bytes()) for photo in (COFFEE, CHELSEA)), strict=True)

    answer = infer(server, reference.__name__, {"image": np.array(files, np.object_)[:, None]})["pixels"]

    expected = np.stack([reference(image) for image in images])
    assert (answer.dtype, answer.shape) == (expected.dtype, expected.shape)
    differences = np.abs(answer.astype(np.float32) - expected.astype(np.float32))
    one_level = {"clip_half": 1 / 255 / CLIP_STD.min()}.get(reference.__name__, 1.0)
    assert differences.max() <= one_level * 1.05
    assert (differences > one_level / 2).mean() < 0.01
