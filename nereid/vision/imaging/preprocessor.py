"""Preprocessing of batches on the CPU, and previews of the results."""

import io
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from PIL import Image

from nereid.base.errors import InvalidImage, ServingError, from_exception
from nereid.base.processes import return_memory
from nereid.vision.imaging.decode import LARGE_PIXELS, Buffers, EncodedImage, ImageLimits, open_image
from nereid.vision.imaging.image_signals import ImageMeter, Sink
from nereid.vision.imaging.image_times import ImageTimes
from nereid.vision.imaging.preprocess_settings import PreprocessSettings
from nereid.vision.imaging.transform import DATATYPES, Transform

# Nice value of threads that decode large images: on a busy core, they get a ninth of others' time.
NICE_VALUE = 10


class Preprocessor(Protocol):
    """Fills a tensor that is allocated once.

    `times` holds the times of each image in the last batch.
    """

    times: Sequence[ImageTimes]

    @property
    def tensor(self) -> Any:
        """The tensor, a NumPy or CuPy array [max_batch_size, ...]."""

    def prepare(self, images: Sequence[bytes]) -> list[ServingError | None]:
        """Write image `i` into row `i`; return each image's error, or None."""

    def move(self, source: slice, target: slice) -> None:
        """Copy rows of the tensor over earlier ones."""


class PixelBudget:
    """Limits the pixels that threads decode at the same time; an image above the limit is decoded alone."""

    def __init__(self, pixels: int) -> None:
        self._pixels = self._free = pixels
        self._changed = threading.Condition()

    @contextmanager
    def acquire(self, pixels: int) -> Iterator[None]:
        """Wait for room for `pixels`, and reserve it while the context lasts."""
        pixels = min(pixels, self._pixels)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= pixels)
            self._free -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._free += pixels
                self._changed.notify_all()


def _lower_priority() -> None:
    """Lower the calling thread's priority; only Linux has per-thread priorities."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE_VALUE)


class CpuPreprocessor:
    """Decodes and transforms the images of a batch in parallel, each on one of `threads` threads.

    To bound memory, the images in progress together have at most twice the pixels of the largest valid image.
    `sink` receives the signals of each good image.
    """

    def __init__(
        self,
        transform: Transform,
        limits: ImageLimits,
        max_batch_size: int,
        threads: int = 1,
        sink: Sink | None = None,
    ) -> None:
        self.tensor = np.empty((max_batch_size, *transform.shape), DATATYPES[transform.datatype])
        self.times: Sequence[ImageTimes] = ()
        self._transform = transform
        self._limits = limits
        self._meter = ImageMeter(transform, sink) if sink else None
        self._budget = PixelBudget(2 * limits.max_image_pixels)
        self._per_thread = threading.local()
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        # Large images must not slow down other requests.
        self._low_priority_pool = ThreadPoolExecutor(threads, initializer=_lower_priority)

    def prepare(self, images: Sequence[bytes]) -> list[ServingError | None]:
        """Write image `i` into row `i`; return each image's error, or None."""
        self.times = [ImageTimes() for _ in images]
        if self._pool is None or len(images) < 2:
            return list(map(self._prepare_one, images, self.tensor, self.times))
        return list(self._pool.map(self._prepare_one, images, self.tensor, self.times))

    def move(self, source: slice, target: slice) -> None:
        """Copy rows of the tensor over earlier ones."""
        self.tensor[target] = self.tensor[source].copy()

    def _prepare_one(self, encoded: bytes, row: np.ndarray, times: ImageTimes) -> ServingError | None:
        times.record_start(encoded)
        image = None
        try:
            image = open_image(encoded, self._limits)
            times.record_header(image)
            with self._budget.acquire(image.pixel_count):
                if image.pixel_count > LARGE_PIXELS:
                    self._low_priority_pool.submit(self._run_transform, image, row, times).result()
                else:
                    self._run_transform(image, row, times)
            if self._meter:
                self._meter(encoded, image, row)
        except Exception as error:  # a bad image must not fail the others
            return from_exception(error)
        finally:
            times.record_end()
            if image and image.pixel_count > LARGE_PIXELS:
                del image
                return_memory()
        return None

    def _run_transform(self, image: EncodedImage, row: np.ndarray, times: ImageTimes) -> None:
        self._transform(image, row, self._buffers(), times.record_decoding)

    def _buffers(self) -> Buffers:
        if not hasattr(self._per_thread, "buffers"):
            self._per_thread.buffers = Buffers()
        buffers: Buffers = self._per_thread.buffers
        return buffers


@dataclass(frozen=True, slots=True)
class Preview:
    """Network inputs of several images.

    Args:
        png: the inputs side by side, as an RGB PNG file.
        lowest, highest: the range of values that the network receives.
    """

    png: bytes
    lowest: float
    highest: float


def preview(settings: PreprocessSettings, images: Mapping[str, bytes]) -> Preview:
    """Return a preview of what a network receives for `images`, encoded files by name.

    Raises:
        InvalidImage: one is not an image file, is damaged or exceeds a limit.
    """
    transform = settings.transform
    preprocessor = CpuPreprocessor(transform, settings.limits, len(images))
    for name, error in zip(images, preprocessor.prepare([*images.values()]), strict=True):
        if isinstance(error, InvalidImage):
            raise InvalidImage(f"{name}: {error.args[0]}")
        if error is not None:
            raise error
    inputs = preprocessor.tensor.astype(np.float32)
    pixels = np.concatenate([_pixels(transform, tensor) for tensor in inputs], axis=1)
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
