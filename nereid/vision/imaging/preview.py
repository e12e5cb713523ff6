"""Pictures of what a network sees: images after the preprocessing, as pixels again."""

import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nereid.base.serving_errors import InvalidImage
from nereid.vision.imaging.preprocess_settings import PreprocessSettings
from nereid.vision.imaging.preprocessor import CpuPreprocessor
from nereid.vision.imaging.transform import Transform


@dataclass(frozen=True, slots=True)
class Preview:
    """Network inputs of several images.

    Args:
        png: the inputs side by side as RGB, in a PNG file.
        lowest, highest: the range of the numbers that the network receives.
    """

    png: bytes
    lowest: float
    highest: float


def preview(settings: PreprocessSettings, images: Mapping[str, bytes]) -> Preview:
    """Return what a network sees of encoded images, given by their names.

    Raises:
        InvalidImage: one is not an image file, or is damaged or too large.
    """
    from PIL import Image

    transform = settings.transform
    preprocessor = CpuPreprocessor(transform, settings.limits, len(images))
    for name, error in zip(images, preprocessor.prepare([*images.values()]), strict=True):
        if isinstance(error, InvalidImage):
            raise InvalidImage(f"{name}: {error.args[0]}")
        if error is not None:
            raise error
    inputs = preprocessor.tensor.astype(np.float32)
    pixels = np.concatenate([_pixels(transform, each) for each in inputs], axis=1)
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, "PNG")
        return Preview(file.getvalue(), float(inputs.min()), float(inputs.max()))


def _pixels(transform: Transform, network_input: np.ndarray) -> np.ndarray:
    channels_last = network_input if transform.layout == "NHWC" else network_input.transpose(1, 2, 0)
    levels = channels_last * np.array(transform.std) + np.array(transform.mean)
    if transform.datatype == "UINT8":
        levels = channels_last
    rgb = levels[:, :, ::-1] if transform.color_order == "BGR" else levels
    pixels: np.ndarray = np.clip(np.rint(rgb), 0, 255).astype(np.uint8)
    return pixels
