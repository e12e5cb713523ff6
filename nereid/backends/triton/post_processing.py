"""What follows the network of a `fused` model: nothing, or a task's post-processing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from nereid.base.config.model_config import FusedSettings, ModelConfig
from nereid.base.contract import IMAGE
from nereid.base.errors import InvalidConfig, InvalidRequest, ServingError, from_exception
from nereid.base.task_registry import TASK_BY_BACKEND, entry_point_of_backend
from nereid.vision.imaging.pipeline import Batch

RequestImages: TypeAlias = Sequence[bytes] | ServingError
# The tensors of a response, or the error of its request.
PostProcessingOutcome: TypeAlias = dict[str, Any] | ServingError


class Postprocessor(Protocol):
    """Post-processing of a task, built from the config of a model of its backend."""

    @property
    def needed_outputs(self) -> Sequence[str]:
        """Names of the network outputs that it needs."""

    def tensors(self, encoded: bytes, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs for one image, from the network's outputs by name, each a batch of one row.

        Raises:
            ServingError: the image or an output is invalid.
        """


class PassThrough:
    """No step: the model's only output is the network's."""

    def __init__(self, config: ModelConfig, network: ModelConfig) -> None:
        scores = network.outputs[0]
        if len(config.outputs) != 1 or config.outputs[0].type_and_dims != scores.type_and_dims:
            raise InvalidConfig(
                f"model '{config.name}': expected one output like '{scores.name}' of its network, "
                f"{scores.type_and_dims}, got {_listed(config)}"
            )
        self.needed_outputs: Sequence[str] = (scores.name,)
        self._name = config.outputs[0].name

    def accept(self, images: RequestImages) -> RequestImages:
        """Accept any number of images."""
        return images

    def finish(
        self, batch: Batch, images: Sequence[RequestImages], outputs: Mapping[str, Any]
    ) -> list[PostProcessingOutcome]:
        """Return each request's rows.

        Args:
            batch: the prepared batch; its outcomes are rows of the outputs, or errors.
            outputs: of the network by name, one row per image.
        """
        scores = outputs[self.needed_outputs[0]]
        return [
            rows if isinstance(rows, ServingError) else {self._name: scores[rows]} for rows in batch.outcomes
        ]


class PostprocessPerImage:
    """Post-processing of a task, for one image per request."""

    def __init__(
        self, config: ModelConfig, network: ModelConfig, after: ModelConfig, step: Postprocessor
    ) -> None:
        if {(output.name, output.type_and_dims) for output in config.outputs} != {
            (output.name, output.type_and_dims) for output in after.outputs
        }:
            raise InvalidConfig(
                f"model '{config.name}': expected the outputs of '{after.name}', {_listed(after)}, "
                f"got {_listed(config)}"
            )
        kinds = {tensor.name: tensor.type_and_dims for tensor in network.outputs}
        for tensor in after.inputs:
            if tensor.name != IMAGE and kinds.get(tensor.name) != tensor.type_and_dims:
                raise InvalidConfig(
                    f"model '{config.name}': '{after.name}' needs '{tensor.name}' {tensor.type_and_dims}, "
                    f"network '{network.name}' returns {_listed(network)}"
                )
        self._step, self.needed_outputs = step, step.needed_outputs

    def accept(self, images: RequestImages) -> RequestImages:
        """Accept one image, because the number of results differs between images."""
        return only_one(images)

    def finish(
        self, batch: Batch, images: Sequence[RequestImages], outputs: Mapping[str, Any]
    ) -> list[PostProcessingOutcome]:
        """Return the results for each request's image; the arguments are those of `PassThrough.finish`."""
        return [
            rows
            if isinstance(rows, ServingError)
            else postprocess(self._step, accepted, {name: array[rows] for name, array in outputs.items()})
            for accepted, rows in zip(images, batch.outcomes, strict=True)
        ]


PostProcessing: TypeAlias = PassThrough | PostprocessPerImage


def postprocess(
    step: Postprocessor, images: RequestImages, arrays: Mapping[str, np.ndarray]
) -> PostProcessingOutcome:
    """Return the outcome of a request with one image; a bad one must not fail the others."""
    if isinstance(images, ServingError):
        return images
    try:
        return step.tensors(images[0], arrays)
    except Exception as error:
        return from_exception(error)


def open_postprocessor(config: ModelConfig) -> Postprocessor | None:
    """Return the post-processing that a model's config describes; None if its backend belongs to no task.

    Raises:
        InvalidConfig: the config is invalid.
    """
    open_step: Callable[[ModelConfig], Postprocessor] | None = entry_point_of_backend(
        config.document.get("backend", ""), "post_processing"
    )
    return open_step(config) if open_step else None


def open_post_processing(
    config: ModelConfig, settings: FusedSettings, network: ModelConfig
) -> PostProcessing:
    """Return what follows the network of a `fused` model.

    Raises:
        InvalidConfig: the sibling is missing or of another backend, or the tensors do not fit.
    """
    if not settings.after:
        return PassThrough(config, network)
    after = config.sibling(settings.after, settings.after_version)
    if step := open_postprocessor(after):
        return PostprocessPerImage(config, network, after, step)
    backends = " or ".join(
        name for name, task in TASK_BY_BACKEND.items() if "post_processing" in task.entry_points
    )
    raise InvalidConfig(
        f"model '{config.name}', after: expected a model of backend {backends}, "
        f"got '{settings.after}' of backend '{after.document.get('backend', '')}'"
    )


def only_one(images: RequestImages) -> RequestImages:
    """Return the image of a request, or an error if the request does not have exactly one."""
    if isinstance(images, ServingError) or len(images) == 1:
        return images
    return InvalidRequest(f"expected one image per request, got {len(images)}")


def _listed(config: ModelConfig) -> str:
    return ", ".join(f"'{tensor.name}' {tensor.type_and_dims}" for tensor in config.outputs) or "none"
