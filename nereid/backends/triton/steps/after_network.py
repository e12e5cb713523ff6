"""The steps of a model after its network, in the process of a `fused` model: none, or those of a sibling."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from nereid.base.config.model_config import FusedSettings, ModelConfig
from nereid.base.contract import IMAGE
from nereid.base.serving_errors import InvalidConfig, InvalidRequest, ServingError, from_exception
from nereid.vision.imaging.pipeline import Batch

Images: TypeAlias = Sequence[bytes] | ServingError
# The tensors of a response, or the error of its request.
Outcome: TypeAlias = dict[str, Any] | ServingError


class AfterNetwork(Protocol):
    """Turns the outputs of a network into those of the model."""

    @property
    def wanted(self) -> Sequence[str]:
        """Names of the outputs of the network that it needs."""

    def accept(self, images: Images) -> Images:
        """Return the images of a request, or the error of a request that the model does not answer."""

    def finish(self, batch: Batch, images: Sequence[Images], outputs: Mapping[str, Any]) -> list[Outcome]:
        """Return the outcome of each request.

        Args:
            batch: the prepared batch; its outcomes are rows of the outputs, or errors.
            images: those of each request.
            outputs: of the network by name, one row per image.
        """


class PassOn:
    """No step: the only output of the model is that of the network."""

    def __init__(self, config: ModelConfig, network: ModelConfig) -> None:
        scores = network.outputs[0]
        if len(config.outputs) != 1 or config.outputs[0].kind != scores.kind:
            raise InvalidConfig(
                f"model '{config.name}': expected one output like '{scores.name}' of its network, "
                f"{scores.kind}, got {_listed(config)}"
            )
        self.wanted, self._name = (scores.name,), config.outputs[0].name

    def accept(self, images: Images) -> Images:
        """Accept any number of images."""
        return images

    def finish(self, batch: Batch, images: Sequence[Images], outputs: Mapping[str, Any]) -> list[Outcome]:
        """Return each request's rows."""
        (scores,) = (outputs[name] for name in self.wanted)
        return [
            rows if isinstance(rows, ServingError) else {self._name: scores[rows]} for rows in batch.outcomes
        ]


class FindObjects:
    """The step of a `boxes` model: boxes, scores and labels of one image per request."""

    def __init__(self, config: ModelConfig, network: ModelConfig, after: ModelConfig) -> None:
        from nereid.tasks.detect.detector import Detector, outputs_by_role

        self._detector, self._by_role = Detector.from_config(after), outputs_by_role
        if {(each.name, each.kind) for each in config.outputs} != {(e.name, e.kind) for e in after.outputs}:
            raise InvalidConfig(
                f"model '{config.name}': expected the outputs of '{after.name}', {_listed(after)}, "
                f"got {_listed(config)}"
            )
        made = {each.name: each for each in network.outputs}
        for each in after.inputs:
            if each.name != IMAGE and (each.name not in made or made[each.name].kind != each.kind):
                raise InvalidConfig(
                    f"model '{config.name}': '{after.name}' needs '{each.name}' {each.kind}, "
                    f"network '{network.name}' returns {_listed(network)}"
                )
        self.wanted = tuple(each.name for each in self._detector.head.outputs)

    def accept(self, images: Images) -> Images:
        """Accept one image: images differ in their number of objects."""
        return only_one(images)

    def finish(self, batch: Batch, images: Sequence[Images], outputs: Mapping[str, Any]) -> list[Outcome]:
        """Return the objects of each request's image."""
        return [self._find(each, rows, outputs) for each, rows in zip(images, batch.outcomes, strict=True)]

    def _find(self, images: Images, rows: slice | ServingError, outputs: Mapping[str, Any]) -> Outcome:
        if isinstance(rows, ServingError):
            return rows
        try:
            assert not isinstance(images, ServingError)
            arrays = self._by_role(self._detector, {name: each[rows] for name, each in outputs.items()})
            found = self._detector.find(self._detector.upright_size(images[0]), arrays)
            return self._detector.tensors(found)
        except Exception as error:  # a bad image must not fail the others
            return from_exception(error)


# By the backend of the sibling that an ensemble has as its last step.
STEPS: Mapping[str, Callable[[ModelConfig, ModelConfig, ModelConfig], AfterNetwork]] = {"boxes": FindObjects}


def open_after(config: ModelConfig, names: FusedSettings, network: ModelConfig) -> AfterNetwork:
    """Return what comes after the network of a `fused` model.

    Raises:
        InvalidConfig: the sibling is missing or of another backend, or the tensors do not fit.
    """
    if not names.after:
        return PassOn(config, network)
    after = config.sibling(names.after, names.after_version)
    backend = str(after.document.get("backend", ""))
    if backend not in STEPS:
        raise InvalidConfig(
            f"model '{config.name}', after: expected a model of backend {' or '.join(STEPS)}, "
            f"got '{names.after}' of backend '{backend}'"
        )
    return STEPS[backend](config, network, after)


def only_one(images: Images) -> Images:
    """Return the image of a request, or the error of a request that has not exactly one."""
    if isinstance(images, ServingError) or len(images) == 1:
        return images
    return InvalidRequest(f"expected one image per request, got {len(images)}")


def _listed(config: ModelConfig) -> str:
    return ", ".join(f"'{each.name}' {each.kind}" for each in config.outputs) or "none"
