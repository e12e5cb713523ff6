"""On real photos the network sees what Pillow would have shown it."""

import pytest

from loadtest.parity import DEFAULT, WAYS, WHOLE, as_jpeg, judge, packaged
from nereid.assets import REPOSITORY
from nereid.config.model_config import ModelConfig
from nereid.imaging.preprocess_settings import PreprocessSettings
from nereid.inference.session import Session

PHOTOS = {path.name: as_jpeg(path) for path in packaged()}


@pytest.fixture(scope="module")
def settings():
    """The transform of the repository's preprocessing model."""
    return PreprocessSettings.from_config(ModelConfig.from_file(REPOSITORY / "imagenet_preprocess", 1))


@pytest.fixture(scope="module")
def session():
    """The FP32 network."""
    return Session.from_config(ModelConfig.from_file(REPOSITORY / "efficientnet_lite0", 1))


# Levels of 255. The whole image is resampled as Pillow does, to within one level at half-way values.
@pytest.mark.parametrize(("way", "levels"), [(WHOLE, 0.01), (DEFAULT, 2.0)], ids=["whole", "scaled"])
@pytest.mark.parametrize("name", PHOTOS)
def test_photo_is_what_pillow_makes_of_it(settings, session, name, way, levels):
    """Pixels hardly differ, the best class is the same, and its probability moves by 0.03 at most."""
    (judgement,) = judge(WAYS[way], {name: PHOTOS[name]}, settings, session)

    assert judgement.difference <= levels
    assert judgement.is_top1_equal
    assert abs(judgement.change) <= 0.03


def test_default_is_the_one_that_was_judged(settings):
    """The margin of the way called the default is the library's own."""
    assert WAYS[DEFAULT].keywords == {"margin": settings.transform.decode_margin}


def test_photos_are_many_and_some_are_decoded_scaled(settings, session):
    """Twelve photos or more, and among them some large enough for the path that is not exact."""
    judgements = list(judge(WAYS[DEFAULT], PHOTOS, settings, session))

    assert len(judgements) >= 12
    assert any(judgement.difference > 0.1 for judgement in judgements)
