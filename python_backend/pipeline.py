"""Encoded images in, one contiguous batch of network inputs out; a bad request fails alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from python_backend.decode import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, Limits, decode
from python_backend.errors import InferenceFailed, InvalidConfig, InvalidImage, ServingError
from python_backend.model_config import ModelConfig
from python_backend.transform import Transform


@dataclass(frozen=True, slots=True)
class PreprocessSettings:
    """Parameters of a `preprocess` model's config.pbtxt: those of `Transform` and of `Limits`."""

    resize_shorter_px: int
    crop_px: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_image_bytes: int = MAX_IMAGE_BYTES
    max_image_pixels: int = MAX_IMAGE_PIXELS

    def __post_init__(self) -> None:
        self.transform()
        for name in ("max_image_bytes", "max_image_pixels"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def transform(self) -> Transform:
        """Build the transform these settings describe."""
        return Transform(self.resize_shorter_px, self.crop_px, self.mean, self.std)

    def limits(self) -> Limits:
        """Build the limits these settings describe."""
        return Limits(self.max_image_bytes, self.max_image_pixels)


@dataclass(frozen=True, slots=True)
class Batch:
    """`tensor` float32[N, C, H, W] of all good requests; per request its rows, or why it has none."""

    tensor: np.ndarray
    outcomes: list[slice | ServingError]


class Pipeline:
    """Decode and transform batches into a buffer that is reused: a result is valid until the next `run`."""

    def __init__(self, transform: Transform, limits: Limits, max_batch_size: int) -> None:
        self._transform = transform
        self._limits = limits
        self._buffer = np.empty((max(1, max_batch_size), *transform.shape), np.float32)

    @classmethod
    def from_config(cls, config: ModelConfig, max_batch_size: int | None = None) -> "Pipeline":
        """Build the pipeline a `preprocess` model describes, for batches of up to `max_batch_size` images.

        Raises:
            InvalidConfig: a parameter is wrong, or the output's dims are not what the parameters produce.
        """
        settings = config.settings(PreprocessSettings)
        transform = settings.transform()
        for output in config.outputs:
            if output.dims != transform.shape:
                raise InvalidConfig(
                    f"model '{config.name}', output '{output.name}': parameters produce "
                    f"{list(transform.shape)}, dims say {list(output.dims)}"
                )
        return cls(transform, settings.limits(), max_batch_size or config.max_batch_size)

    def run(self, requests: Sequence[Sequence[bytes]]) -> Batch:
        """Prepare the images of several requests, one after the other.

        A request with a bad image fails whole, with an error that names every bad index in it.
        """
        outcomes: list[slice | ServingError] = []
        filled = 0
        for images in requests:
            errors = self._fill(images, filled)
            if errors:
                outcomes.append(_merge(errors, len(images)))
            else:
                outcomes.append(slice(filled, filled + len(images)))
                filled += len(images)
        return Batch(self._buffer[:filled], outcomes)

    def _fill(self, images: Sequence[bytes], start: int) -> dict[int, ServingError]:
        errors: dict[int, ServingError] = {}
        for index, encoded in enumerate(images):
            try:
                image = decode(encoded, self._transform.resize_shorter_px, self._limits)
                self._transform(image, self._buffer[start + index])
            except ServingError as error:
                errors[index] = error
            except Exception as error:  # whatever one image does, the others are answered
                errors[index] = InferenceFailed(f"{type(error).__name__}: {error}")
        return errors


def _merge(errors: dict[int, ServingError], count: int) -> ServingError:
    if count == 1:
        return errors[0]
    listed = "; ".join(f"image {index}: {error.args[0]}" for index, error in errors.items())
    kinds = {type(error) for error in errors.values()}
    kind = InvalidImage if kinds == {InvalidImage} else InferenceFailed
    return kind(f"{len(errors)} of {count} images cannot be used: {listed}")
