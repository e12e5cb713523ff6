"""Preprocessing of batches on a GPU: nvImageCodec decodes, and one kernel does the rest.

This module needs CuPy and nvImageCodec, so only instances on a GPU import it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cupy
import cupyx
import numpy as np
import simplejpeg
from nvidia import nvimgcodec

from nereid.base.errors import (
    InferenceFailed,
    InvalidConfig,
    ServingError,
    find_device_failure,
    from_exception,
)
from nereid.vision.imaging.decode import Buffers, EncodedImage, ImageLimits, open_image
from nereid.vision.imaging.image_times import ImageTimes
from nereid.vision.imaging.kernel import (
    BLOCK_XY,
    IMAGE,
    SOURCE,
    Source,
    build_channels,
    build_table,
    grid,
    options,
)
from nereid.vision.imaging.transform import DATATYPES, Transform

# Pinned memory for uploading pixels decoded on the host, enough for a photo of about 5 megapixels.
STAGING_BYTES = 16 * 2**20
# Hardware engine first, if present. No CPU_ONLY, because our own decoder handles what these reject.
BACKENDS = ("HW_GPU_ONLY", "GPU_ONLY", "HYBRID_CPU_GPU")
# Interpolates chroma as libjpeg does; off by default.
DECODER_OPTIONS = ":fancy_upsampling=1"
END_OF_IMAGE = b"\xff\xd9"
# Some writers pad a file after its end marker.
TAIL_BYTES = 64
PROBE_PX = 64
# Reusing the memory of decoded images saves a fifth of the decoder's time. Two sets
# alternate: the kernel reads one while the next batch is decoded into the other. An oversized set is freed.
DECODE_BUFFER_COUNT, KEPT_BYTES = 2, 256 * 2**20


@dataclass(frozen=True, slots=True)
class Decoded:
    """Location of an image's pixels on the device, valid as long as `owner` is alive."""

    source: Source
    owner: Any


class _Slot:
    """The buffers of one batch: its tensor, and its table of images on the host and on the device."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.staged_table = cupyx.empty_pinned(len(tensor) * IMAGE.itemsize, np.uint8)
        self.table = cupy.empty(self.staged_table.shape, np.uint8)


class _DecodeBuffers:
    """Decoded images whose memory is reused, and their largest sizes so far, in bytes.

    `is_read` is recorded after the last read; until then, `owners` keeps alive what the device reads.
    """

    def __init__(self, stream: Any) -> None:
        self.images: list[Any] = []
        self.owners: list[Any] = []
        self.sizes: list[int] = []
        self.is_read = cupy.cuda.Event(disable_timing=True)
        # The last attribute, because it must outlive the images: nvImageCodec frees an image on the stream
        # that decoded it, and crashes if that stream no longer exists.
        self.stream = stream

    def keep(self, images: Sequence[Any]) -> None:
        """Keep decoded images for a later batch unless they exceed `KEPT_BYTES`."""
        sizes = [image.shape[0] * image.strides[0] for image in images]
        before = self.sizes[: len(sizes)] + [0] * (len(sizes) - len(self.sizes))
        self.sizes = [max(pair) for pair in zip(sizes, before, strict=True)] + self.sizes[len(sizes) :]
        if len(images) > len(self.images):
            self.images, self.sizes = [*images], sizes
        if sum(self.sizes) > KEPT_BYTES:
            self.images, self.sizes = [], []


class GpuPreprocessor:
    """Decodes and transforms the images of a batch on one GPU.

    Attributes:
        tensors: one CuPy array [max_batch_size, *transform.shape] of transform.datatype per slot, allocated
            once. `prepare` uses the first.
        stream: orders all work on the device.
        fallbacks: number of images that were decoded on the host.
    """

    def __init__(
        self,
        transform: Transform,
        limits: ImageLimits,
        max_batch_size: int,
        device_id: int,
        memory_limit_bytes: int = 0,
        slots: int = 1,
    ) -> None:
        """Allocate the tensors and compile the kernel.

        Args:
            memory_limit_bytes: limit for the tensors and for pixels uploaded from the host, without
                nvImageCodec's memory; 0 for no limit.
            slots: number of tensors, one for each batch in progress.

        Raises:
            InvalidConfig: the tensors exceed the limit, or the decoder cannot use the GPU.
        """
        self.fallbacks, self.device_id = 0, device_id
        self.times: Sequence[ImageTimes] = ()
        self._transform = transform
        self._limits = limits
        self._buffers = Buffers()
        self._device = cupy.cuda.Device(device_id)
        # This pool uses cudaMalloc, as CuPy does by default; Triton cannot share memory from cudaMallocAsync.
        self._pool = cupy.cuda.MemoryPool()
        with self._device:
            self._pool.set_limit(size=memory_limit_bytes)
            self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.on_device():
            self._slots = [_Slot(self._allocate(max_batch_size, memory_limit_bytes)) for _ in range(slots)]
            self._decode_buffers, self._next_buffers = (
                [_DecodeBuffers(self.stream) for _ in range(DECODE_BUFFER_COUNT)],
                0,
            )
            self._staging = cupyx.empty_pinned(STAGING_BYTES, np.uint8)
            self._channels = build_channels(transform)
            self._kernel = cupy.RawKernel(SOURCE.read_text(), "preprocess", options(transform))
            self._kernel.compile()
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False)
        kinds = [nvimgcodec.Backend(getattr(nvimgcodec.BackendKind, name)) for name in BACKENDS]
        self._decoder = nvimgcodec.Decoder(device_id=device_id, backends=kinds, options=DECODER_OPTIONS)
        self._check_decoder()

    def prepare(self, images: Sequence[bytes]) -> list[ServingError | None]:
        """Write image `i` into row `i`; return each image's error, or None. A failed image's row is padding.

        Raises:
            InferenceFailed: there are more images than rows.
            CUDARuntimeError, CUDADriverError: the device failed; see `find_device_failure`.
        """
        if not images:
            self.times = ()
            return []
        with self.on_device():
            decoded, prepared = cupy.cuda.Event(), cupy.cuda.Event()
            try:
                errors = self.enqueue(images, 0, decoded)
                prepared.record(self.stream)
            finally:
                # A consumer of the tensor through DLPack waits for CuPy's current stream, a different one.
                # After a decoder error, this raises the device's error if the device is broken.
                self.stream.synchronize()
            end_ns = time.time_ns()
            self.release()
            decoded_ns = end_ns - round(cupy.cuda.get_elapsed_time(decoded, prepared) * 1e6)
        for times in self.times:
            times.record_end(decoded_ns, end_ns)
        return errors

    def enqueue(self, images: Sequence[bytes], slot: int, decoded: Any) -> list[ServingError | None]:
        """Enqueue a batch on `stream`, image `i` into row `i` of a slot's tensor; return the errors.

        Nothing may still be reading or writing the slot's tensor, or copying its table.

        Args:
            decoded: event to record after decoding.

        Raises:
            InferenceFailed, CUDARuntimeError, CUDADriverError: as for `prepare`.
        """
        rows = len(self._slots[slot].tensor)
        if len(images) > rows:
            raise InferenceFailed(f"expected at most {rows} images per batch, got {len(images)}")
        self.times = [ImageTimes() for _ in images]
        for times, encoded in zip(self.times, images, strict=True):
            times.record_start(encoded)
        buffers = self._decode_buffers[self._next_buffers]
        buffers.is_read.synchronize()
        buffers.owners = []
        with self.on_device():
            outcomes = self.decode(images)
            decoded.record(self.stream)
            self.resize([image.source if isinstance(image, Decoded) else None for image in outcomes], slot)
            buffers.is_read.record(self.stream)
            buffers.owners.append(outcomes)
        self._next_buffers = (self._next_buffers + 1) % DECODE_BUFFER_COUNT
        return [outcome if isinstance(outcome, ServingError) else None for outcome in outcomes]

    def release(self) -> None:
        """Release everything that the device has read; call this only when nothing is enqueued."""
        for buffers in self._decode_buffers:
            buffers.owners = []

    @property
    def held_bytes(self) -> int:
        """Memory of the tensors and of uploaded pixels, in use or cached, without nvImageCodec's."""
        return int(self._pool.total_bytes())

    @property
    def tensor(self) -> Any:
        """The tensor of the first slot."""
        return self._slots[0].tensor

    @property
    def tensors(self) -> list[Any]:
        """The tensor of each slot."""
        return [slot.tensor for slot in self._slots]

    def move(self, source: slice, target: slice) -> None:
        """Copy rows of the tensor over earlier ones."""
        with self.on_device():
            self.tensor[target] = self.tensor[source].copy()
            self.stream.synchronize()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make CuPy use this object's device, stream and memory pool in the calling thread."""
        with self._device, self.stream, cupy.cuda.using_allocator(self._pool.malloc):
            yield

    def decode(self, images: Sequence[bytes]) -> list[Decoded | ServingError]:
        """Decode a batch at full size and in the stored orientation; call this `on_device`."""
        opened = [self._open(encoded) for encoded in images]
        for times, image in zip(self.times, opened, strict=False):
            if isinstance(image, EncodedImage):
                times.record_header(image)
        suited = {i: image for i, image in enumerate(opened) if _suits_gpu(image)}
        files = [image.encoded for image in suited.values() if isinstance(image, EncodedImage)]
        by_index = dict(zip(suited, self._decode_files(files), strict=True))
        return [
            image if isinstance(image, ServingError) else self._to_decoded(image, by_index.get(i))
            for i, image in enumerate(opened)
        ]

    def resize(self, sources: Sequence[Source | None], slot: int = 0) -> None:
        """Write image `i` into row `i` of a slot's tensor, in one kernel launch; call this `on_device`."""
        buffers = self._slots[slot]
        build_table(sources, self._transform, buffers.staged_table.view(IMAGE)[: len(sources)])
        buffers.table.set(buffers.staged_table, stream=self.stream)
        height, width = np.int32(self._transform.height_px), np.int32(self._transform.width_px)
        arguments = buffers.table, self._channels, buffers.tensor, height, width
        self._kernel(grid(self._transform, len(sources)), (*BLOCK_XY, 1), arguments)

    def _allocate(self, max_batch_size: int, memory_limit_bytes: int) -> Any:
        shape = max_batch_size, *self._transform.shape
        try:
            return cupy.empty(shape, DATATYPES[self._transform.datatype])
        except cupy.cuda.memory.OutOfMemoryError as error:
            limit = f"gpu_memory_limit_bytes = {memory_limit_bytes}"
            raise InvalidConfig(f"{limit}: expected room for the tensor {list(shape)}: {error}") from None

    def _check_decoder(self) -> None:
        """Fail if every image would be decoded on the host: nvImageCodec also starts without nvJPEG."""
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
        buffers = self._decode_buffers[self._next_buffers]
        streams = [nvimgcodec.CodeStream(file) for file in files]
        reused = {"images": buffers.images[: len(files)]} if len(files) <= len(buffers.images) else {}
        buffers.owners.append(streams)
        surfaces = self._decoder.decode(streams, params=self._params, cuda_stream=self.stream.ptr, **reused)
        if all(surface is not None for surface in surfaces):
            buffers.keep(surfaces)
        else:  # the other images' sizes may also have changed
            buffers.images, buffers.sizes = [], []
        return list(surfaces)

    def _open(self, encoded: bytes) -> EncodedImage | ServingError:
        try:
            return open_image(encoded, self._limits)
        except Exception as error:  # a bad image must not fail the others
            return from_exception(error)

    def _to_decoded(self, image: EncodedImage, surface: Any) -> Decoded | ServingError:
        width, height = image.size_wh
        if surface is not None and tuple(surface.shape) == (height, width, 3):
            pointer = surface.__cuda_array_interface__["data"][0]
            return Decoded(Source(pointer, surface.strides[0], height, width, image.orientation), surface)
        self.fallbacks += 1
        try:
            pixels = image.pixels(1, self._transform.background_color, self._buffers)
            array = self._upload(pixels)
        except Exception as error:  # a damaged file, or the memory limit
            if find_device_failure(error):
                raise
            return from_exception(error)
        return Decoded(Source(array.data.ptr, width * 3, height, width, image.orientation), array)

    def _upload(self, pixels: np.ndarray) -> Any:
        flat = np.ascontiguousarray(pixels).reshape(-1)
        array = cupy.empty(flat.shape, np.uint8)
        for start in range(0, flat.size, STAGING_BYTES):
            part = flat[start : start + STAGING_BYTES]
            self.stream.synchronize()  # the previous copy from this memory may still be running
            self._staging[: part.size] = part
            array[start : start + part.size].set(self._staging[: part.size], stream=self.stream)
        return array


def _suits_gpu(image: EncodedImage | ServingError) -> bool:
    """Return whether the GPU can decode the image: a complete grey or RGB JPEG.

    nvJPEG decodes a truncated JPEG without an error; the host's decoder reports it.
    """
    if isinstance(image, ServingError) or image.colorspace != "RGB":
        return False
    return END_OF_IMAGE in image.encoded[-TAIL_BYTES:]
