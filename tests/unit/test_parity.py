"""On real photos the network sees what Pillow would have shown it."""

import io

import numpy as np
import pytest
from PIL import Image

from nereid.assets import REPOSITORY
from nereid.config.model_config import ModelConfig
from nereid.imaging.decode import open_image
from nereid.imaging.pipeline import Pipeline
from nereid.imaging.preprocess_settings import PreprocessSettings
from nereid.imaging.transform import make_plan
from nereid.inference.session import Session
from tests.drift_photos import jpeg, packaged

CONFIG = ModelConfig.from_file(REPOSITORY / "imagenet_preprocess", 1)
SETTINGS = PreprocessSettings.from_config(CONFIG)
TRANSFORM = SETTINGS.transform
MEAN, STD = (np.array(values, np.float32)[:, None, None] for values in (TRANSFORM.mean, TRANSFORM.std))
PHOTOS = {
    path.name: path.read_bytes() if path.suffix == ".jpg" else jpeg(Image.open(path).convert("RGB"))
    for path in packaged()
}


@pytest.fixture(scope="module")
def pipeline():
    return Pipeline.from_config(CONFIG, 1)


@pytest.fixture(scope="module")
def session():
    return Session.from_config(ModelConfig.from_file(REPOSITORY / "efficientnet_lite0", 1))


def pillow(photo: bytes) -> np.ndarray:
    """Compute the reference with Pillow alone, from all pixels: float32[3, H, W] in levels of 255."""
    image = Image.open(io.BytesIO(photo)).convert("RGB")
    rows, columns = (placement.span for placement in TRANSFORM.place(image.size))
    resized = image.resize((columns.resized, rows.resized), Image.Resampling.BILINEAR)
    box = (columns.offset, rows.offset, columns.offset + columns.count, rows.offset + rows.count)
    return np.asarray(resized.crop(box), np.float32).transpose(2, 0, 1)


@pytest.mark.parametrize("name", PHOTOS)
def test_photo_is_what_pillow_makes_of_it(pipeline, session, name):
    """Levels differ by at most 2 of 255 on average; the best class is equal, its probability within 0.03."""
    expected = pillow(PHOTOS[name])
    got = pipeline.run([[PHOTOS[name]]]).tensor

    assert np.abs(got[0] * STD + MEAN - expected).mean() <= 2.0
    wanted = ((expected - MEAN) / STD)[None]
    before, after = (session.run({"input": each}, ["scores"])[0][0] for each in (wanted, got))
    best = before.argmax()
    assert after.argmax() == best
    assert abs(after[best] - before[best]) <= 0.03


def test_photos_are_many_and_some_are_decoded_scaled():
    images = [open_image(photo, SETTINGS.limits) for photo in PHOTOS.values()]

    assert len(images) >= 12
    shrinks = {make_plan(TRANSFORM, each.size_wh, 1, each.max_shrink).shrink for each in images}
    assert max(shrinks) > min(shrinks)
