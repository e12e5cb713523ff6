"""Preprocessing pipeline, from requests with encoded images to one batch of network inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nereid.base.config.model_config import ModelConfig
from nereid.base.contract import IMAGE, format_bad_images
from nereid.base.errors import (
    DeviceFailed,
    InferenceFailed,
    InvalidConfig,
    InvalidImage,
    ServingError,
    from_exception,
)
from nereid.base.processes import available_cores
from nereid.vision.imaging.image_signals import Sink
from nereid.vision.imaging.image_times import ImageTimes
from nereid.vision.imaging.preprocess_settings import PreprocessSettings
from nereid.vision.imaging.preprocessor import CpuPreprocessor, Preprocessor

# Name, datatype and dimensions of the only input.
_INPUT = (IMAGE, "TYPE_STRING", (1,))


@dataclass(frozen=True, slots=True)
class Batch:
    """The `tensor` [N, ...] of all good requests, and in `outcomes` each request's rows or error.

    `times` holds the times of each request's images.
    """

    tensor: Any
    outcomes: list[slice | ServingError]
    times: list[Sequence[ImageTimes]]

    @property
    def device_failure(self) -> DeviceFailed | None:
        """The first `DeviceFailed` in `outcomes`, or None."""
        return next((outcome for outcome in self.outcomes if isinstance(outcome, DeviceFailed)), None)


class Pipeline:
    """Prepares batches in a tensor that is valid until the next `run`; a bad request fails alone."""

    def __init__(self, preprocessor: Preprocessor) -> None:
        self.preprocessor = preprocessor

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        max_batch_size: int | None = None,
        instances: int | None = None,
        sink: Sink | None = None,
        slots: int = 1,
    ) -> "Pipeline":
        """Build the pipeline of a `preprocess` model on its instance's device.

        Args:
            max_batch_size, instances: values of another model that runs the pipeline; default: the config's.
            sink: receives the signals of each good image; on a GPU, none are measured.
            slots: on a GPU, the number of tensors, one for each batch in progress.

        Raises:
            InvalidConfig: a parameter is invalid, or contradicts another one or the tensors.
        """
        settings = PreprocessSettings.from_config(config)
        if [(tensor.name, tensor.datatype, tensor.dims) for tensor in config.inputs] != [_INPUT]:
            got = ", ".join(f"'{tensor.name}' {tensor.type_and_dims}" for tensor in config.inputs)
            raise InvalidConfig(
                f"model '{config.name}': expected one input, 'image' TYPE_STRING [1], got {got or 'none'}"
            )
        size = config.max_batch_size if max_batch_size is None else max_batch_size
        if size < 1:
            raise InvalidConfig(f"model '{config.name}', max_batch_size: expected 1 or more, got {size}")
        if config.device_kind == "GPU":
            return cls(_on_gpu(config, settings, size, slots))
        return cls(_on_cpu(config, settings, size, instances or config.cpu_instances or 1, sink))

    def run(self, requests: Sequence[Sequence[bytes] | ServingError]) -> Batch:
        """Prepare the images of several requests; a request that is already an error is passed through.

        A request with a bad image fails as a whole, with an error that lists the indexes of all bad images.
        """
        errors = self._prepare(images_of(requests))
        outcomes, times = by_request(requests, errors, self.preprocessor.times)
        filled = 0
        for index, rows in enumerate(outcomes):
            if isinstance(rows, slice):
                outcomes[index] = self._moved(rows, slice(filled, filled + rows.stop - rows.start))
                filled += rows.stop - rows.start
        return Batch(self.preprocessor.tensor[:filled], outcomes, times)

    def _moved(self, rows: slice, target: slice) -> slice | ServingError:
        try:
            if rows != target:
                self.preprocessor.move(rows, target)
        except Exception as error:
            return from_exception(error)
        return target

    def _prepare(self, images: Sequence[bytes]) -> Sequence[ServingError | None]:
        rows = len(self.preprocessor.tensor)
        try:
            if len(images) > rows:
                raise InferenceFailed(f"expected at most {rows} images per batch, got {len(images)}")
            return self.preprocessor.prepare(images)
        except Exception as error:  # if the device fails, every request fails
            self.preprocessor.times = ()
            return [from_exception(error)] * len(images)


def images_of(requests: Sequence[Sequence[bytes] | ServingError]) -> list[bytes]:
    """Return the images of all requests that are not errors."""
    return [image for images in requests if not isinstance(images, ServingError) for image in images]


def by_request(
    requests: Sequence[Sequence[bytes] | ServingError],
    errors: Sequence[ServingError | None],
    times: Sequence[ImageTimes],
) -> tuple[list[slice | ServingError], list[Sequence[ImageTimes]]]:
    """Return each request's rows or error, and the times of its images.

    Args:
        errors, times: one per image of `images_of`, in the order of the tensor's rows.
    """
    outcomes: list[slice | ServingError] = []
    image_times: list[Sequence[ImageTimes]] = []
    start = 0
    for images in requests:
        if isinstance(images, ServingError):
            outcomes.append(images)
            image_times.append(())
            continue
        rows = slice(start, start + len(images))
        bad = {i: error for i, error in enumerate(errors[rows]) if error is not None}
        outcomes.append(_merge(bad, len(images)) if bad else rows)
        image_times.append(times[rows])
        start = rows.stop
    return outcomes, image_times


def _on_cpu(
    config: ModelConfig, settings: PreprocessSettings, size: int, instances: int, sink: Sink | None
) -> Preprocessor:
    if settings.gpu_memory_limit_bytes:
        raise InvalidConfig(f"model '{config.name}': gpu_memory_limit_bytes contradicts an instance on a CPU")
    threads = settings.decode_threads or max(1, available_cores() // instances)
    return CpuPreprocessor(settings.transform, settings.limits, size, threads, sink)


def _on_gpu(config: ModelConfig, settings: PreprocessSettings, size: int, slots: int) -> Preprocessor:
    if settings.decode_threads:
        raise InvalidConfig(f"model '{config.name}': decode_threads contradicts an instance on a GPU")
    try:  # here, because CuPy and nvImageCodec are installed only on machines with a GPU
        from nereid.vision.imaging.gpu_preprocessor import GpuPreprocessor
    except ImportError as error:
        fix = "an instance on a GPU needs the packages of the extra 'gpu' or 'gpu13'"
        raise InvalidConfig(f"model '{config.name}': {error}; fix: {fix}") from None
    limit = settings.gpu_memory_limit_bytes
    return GpuPreprocessor(settings.transform, settings.limits, size, config.device_id, limit, slots)


def _merge(errors: dict[int, ServingError], count: int) -> ServingError:
    if count == 1:
        return errors[0]
    kinds = {type(error) for error in errors.values()}
    if DeviceFailed in kinds:
        return next(error for error in errors.values() if isinstance(error, DeviceFailed))
    kind = InvalidImage if kinds == {InvalidImage} else InferenceFailed
    return kind(format_bad_images({index: error.args[0] for index, error in errors.items()}, count))
