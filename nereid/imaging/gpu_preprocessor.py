"""Preprocessing of batches on a GPU: nvImageCodec decodes, one kernel computes the rest.

This module needs CuPy and nvImageCodec; only instances on a GPU import it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cupy
import cupyx
import numpy as np
import simplejpeg
from nvidia import nvimgcodec

from nereid.imaging.buffers import Buffers
from nereid.imaging.decode import EncodedImage, Limits, open_image
from nereid.imaging.image_times import ImageTimes
from nereid.imaging.kernel import BLOCK_XY, IMAGE, SOURCE, Source, build_channels, build_table, grid, options
from nereid.imaging.transform import DATATYPES, Transform
from nereid.serving_errors import InvalidConfig, ServingError, from_exception, lost_device

# Pinned memory through which pixels decoded on the host pass: about a photo of 5 megapixels.
STAGING_BYTES = 16 * 2**20
# The hardware engine first, if there is one. Not CPU_ONLY: our own decoder takes the files that these refuse.
BACKENDS = ("HW_GPU_ONLY", "GPU_ONLY", "HYBRID_CPU_GPU")
# Interpolates chroma as libjpeg does; off by default.
DECODER_OPTIONS = ":fancy_upsampling=1"
END_OF_IMAGE = b"\xff\xd9"
# Some writers pad the file after its end.
TAIL_BYTES = 64
PROBE_PX = 64


@dataclass(frozen=True, slots=True)
class Decoded:
    """Location of an image's pixels on the device, valid as long as `owner` is alive."""

    source: Source
    owner: Any


class GpuPreprocessor:
    """Decodes and transforms the images of a batch on one GPU.

    Attributes:
        tensor: CuPy array [max_batch_size, *transform.shape] of transform.datatype, allocated once.
        stream: orders all work on the device.
        fallbacks: number of images that were decoded on the host.
    """

    def __init__(
        self,
        transform: Transform,
        limits: Limits,
        max_batch_size: int,
        device_id: int,
        memory_limit_bytes: int = 0,
    ) -> None:
        """Allocate the tensor and compile the kernel.

        Args:
            memory_limit_bytes: of the tensor and of pixels from the host, 0: no limit; nvImageCodec's memory
                is not included.

        Raises:
            InvalidConfig: the limit is less than the tensor, or the decoder cannot use the GPU.
        """
        self.fallbacks = 0
        self.times: Sequence[ImageTimes] = ()
        self._transform = transform
        self._limits = limits
        self._buffers = Buffers()
        self._device = cupy.cuda.Device(device_id)
        # cudaMalloc's memory, as CuPy's default is: memory of cudaMallocAsync cannot be shared with Triton.
        self._pool = cupy.cuda.MemoryPool()
        with self._device:
            self._pool.set_limit(size=memory_limit_bytes)
            self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.on_device():
            self.tensor = self._allocate(max_batch_size, memory_limit_bytes)
            self._staging = cupyx.empty_pinned(STAGING_BYTES, np.uint8)
            self._staged_table = cupyx.empty_pinned(max_batch_size * IMAGE.itemsize, np.uint8)
            self._table = cupy.empty(self._staged_table.shape, np.uint8)
            self._channels = build_channels(transform)
            self._kernel = cupy.RawKernel(SOURCE.read_text(), "preprocess", options(transform))
            self._kernel.compile()
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False)
        kinds = [nvimgcodec.Backend(getattr(nvimgcodec.BackendKind, name)) for name in BACKENDS]
        self._decoder = nvimgcodec.Decoder(device_id=device_id, backends=kinds, options=DECODER_OPTIONS)
        self._check_decoder()

    def prepare(self, images: Sequence[bytes]) -> list[ServingError | None]:
        """Write image `i` into row `i`; returns its error instead if it has one: its row is padding.

        Raises:
            CUDARuntimeError: the device failed; `lost_device` says whether it stays broken.
        """
        self.times = [ImageTimes() for _ in images]
        if not images:
            return []
        for times, encoded in zip(self.times, images, strict=True):
            times.begin(encoded)
        with self.on_device():
            try:
                outcomes = self.decode(images)
                for times in self.times:
                    times.decoded()
                sources = [each.source if isinstance(each, Decoded) else None for each in outcomes]
                self.resize(sources)
            finally:
                # A consumer of the tensor by DLPack waits for CuPy's current stream, which is another one.
                # And the decoded pixels must stay until the kernel has read them. After an error of the
                # decoder, this raises that of a broken device.
                self.stream.synchronize()
        for times in self.times:
            times.end()
        return [each if isinstance(each, ServingError) else None for each in outcomes]

    def move(self, source: slice, target: slice) -> None:
        """Copy rows of the tensor over earlier ones."""
        with self.on_device():
            self.tensor[target] = self.tensor[source].copy()
            self.stream.synchronize()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make CuPy use this object's device, stream and memory in the calling thread, as `prepare` does."""
        with self._device, self.stream, cupy.cuda.using_allocator(self._pool.malloc):
            yield

    def decode(self, images: Sequence[bytes]) -> list[Decoded | ServingError]:
        """Decode a batch, each image at its full size, as stored; call this `on_device`."""
        opened = [self._open(encoded) for encoded in images]
        suited = {i: image for i, image in enumerate(opened) if _suits_gpu(image)}
        files = [image.encoded for image in suited.values() if isinstance(image, EncodedImage)]
        by_index = dict(zip(suited, self._decode_files(files), strict=True))
        return [
            image if isinstance(image, ServingError) else self._place(image, by_index.get(i))
            for i, image in enumerate(opened)
        ]

    def resize(self, sources: Sequence[Source | None]) -> None:
        """Write image `i` into row `i`, in one launch; call this `on_device`."""
        build_table(sources, self._transform, self._staged_table.view(IMAGE)[: len(sources)])
        self._table.set(self._staged_table, stream=self.stream)
        height, width = np.int32(self._transform.height_px), np.int32(self._transform.width_px)
        arguments = self._table, self._channels, self.tensor, height, width
        self._kernel(grid(self._transform, len(sources)), (*BLOCK_XY, 1), arguments)

    def _allocate(self, max_batch_size: int, memory_limit_bytes: int) -> Any:
        shape = max_batch_size, *self._transform.shape
        try:
            return cupy.empty(shape, DATATYPES[self._transform.datatype])
        except cupy.cuda.memory.OutOfMemoryError as error:
            limit = f"gpu_memory_limit_bytes = {memory_limit_bytes}"
            raise InvalidConfig(f"{limit}: expected room for the tensor {list(shape)}: {error}") from None

    def _check_decoder(self) -> None:
        """Fail if every image would be decoded on the host: nvImageCodec starts without nvJPEG, too."""
        probe = simplejpeg.encode_jpeg(np.zeros((PROBE_PX, PROBE_PX, 3), np.uint8))
        with self.on_device():
            (surface,) = self._decode_files([probe])
            self.stream.synchronize()
        if surface is None:
            fix = "install the wheel nvidia-nvjpeg-cu12, or nvidia-nvjpeg for CUDA 13"
            raise InvalidConfig(f"nvImageCodec cannot decode a JPEG on this GPU; fix: {fix}")

    def _decode_files(self, files: list[bytes]) -> list[Any]:
        if not files:
            return []
        surfaces = self._decoder.decode(files, params=self._params, cuda_stream=self.stream.ptr)
        return list(surfaces)

    def _open(self, encoded: bytes) -> EncodedImage | ServingError:
        try:
            return open_image(encoded, self._limits)
        except Exception as error:  # a bad image must not fail the others
            return from_exception(error)

    def _place(self, image: EncodedImage, surface: Any) -> Decoded | ServingError:
        """Return the location of the decoded image; decodes on the host if the GPU did not."""
        width, height = image.size_wh
        if surface is not None and tuple(surface.shape) == (height, width, 3):
            pointer = surface.__cuda_array_interface__["data"][0]
            return Decoded(Source(pointer, surface.strides[0], height, width, image.orientation), surface)
        self.fallbacks += 1
        try:
            pixels = image.pixels(1, self._transform.background_color, self._buffers)
            array = self._upload(pixels)
        except Exception as error:  # a damaged file, or the memory limit
            if lost_device(error):
                raise
            return from_exception(error)
        return Decoded(Source(array.data.ptr, width * 3, height, width, image.orientation), array)

    def _upload(self, pixels: np.ndarray) -> Any:
        flat = np.ascontiguousarray(pixels).reshape(-1)
        array = cupy.empty(flat.shape, np.uint8)
        for start in range(0, flat.size, STAGING_BYTES):
            part = flat[start : start + STAGING_BYTES]
            self.stream.synchronize()  # the previous copy from this memory may still run
            self._staging[: part.size] = part
            array[start : start + part.size].set(self._staging[: part.size], stream=self.stream)
        return array


def _suits_gpu(image: EncodedImage | ServingError) -> bool:
    """Return whether the GPU can decode the image: a complete grey or RGB JPEG.

    nvJPEG decodes a truncated JPEG without an error, which the host's decoder reports.
    """
    if isinstance(image, ServingError) or image.colorspace != "RGB":
        return False
    return END_OF_IMAGE in image.encoded[-TAIL_BYTES:]
