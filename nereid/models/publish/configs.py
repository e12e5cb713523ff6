"""Configs for an added model: its network, preprocessing, post-processing, pinned model and route."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from google.protobuf import json_format

from nereid.backends.routing.assignment import DEADLINE_MS
from nereid.base import contract
from nereid.base.config.model_config import ServedTensor, empty_config
from nereid.models.publish.importing.serving_settings import ServingSettings
from nereid.repository import pbtxt

CPU_BATCH, GPU_BATCH = 8, 64
VERSION = {"specific": {"versions": [1]}}
# A new version then needs only a folder: a changed config may make Triton reload the other versions.
ALL_VERSIONS: dict[str, Any] = {"all": {}}
ON_CPU = {"kind": "KIND_CPU"}
# Each instance has its own stream, so one runs while the other receives its batch.
ON_GPU = {"kind": "KIND_GPU", "count": 2}
CUDA = {"cudnn_conv_algo_search": "HEURISTIC", "arena_extend_strategy": "kSameAsRequested"}
NETWORK_ON_GPU = {
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    "nereid.cuda_graphs": "true",
    "nereid.halve_batch_if_out_of_memory": "true",
}
SMALL_BATCHES = {"preferred_batch_size": [2, 4]}
# Comments by the field or parameter they precede.
COMMENTS = {
    "FORCE_CPU_ONLY_INPUT_TENSORS": "Without this, Triton first copies every input of a Python-based backend "
    "to the host.",
    "nereid.cuda_graphs": "If the whole network runs on the GPU, each power of two of rows is recorded at "
    "load.",
    "nereid.halve_batch_if_out_of_memory": "A batch that does not fit into memory is run in halves.",
    "optimization": "The defaults try all algorithms in the first run of every batch size, and double the "
    "memory at each growth.",
    "model_warmup": "Every batch size is a new shape, and its first run is slow.",
}
SMALL_BATCHES_COMMENT = "Small batches, so that every instance gets queued requests."
NO_BATCHES_COMMENT = "The network computes one image at a time."
STEPS = "Preprocessing, then version 1 of the network. `cpu` and `gpu` run all in one process instead."
PUBLIC = "The public name: an A/B route between the pinned models."
IN_ONE_PROCESS = "the models that config.pbtxt names as steps, in one process."
Document = dict[str, Any]


class ModelNames(NamedTuple):
    """Names of the models behind one public name, and the route with that name."""

    network: str
    preprocess: str
    pinned: str
    route: str

    @classmethod
    def for_route(cls, route: str) -> "ModelNames":
        """Return the names for a route; the pinned model runs version 1 of both others."""
        return cls(f"{route}_network", f"{route}_preprocess", f"{route}_v1", route)


class PostprocessStep(NamedTuple):
    """A model that computes the pinned model's outputs from a network's outputs and the image."""

    model: str
    backend: str
    outputs: tuple[ServedTensor, ...]
    parameters: Mapping[str, str]


class Addition(NamedTuple):
    """A network with a public name, and its post-processing or the public name of its first output."""

    names: ModelNames
    settings: ServingSettings
    output: str = ""
    last: PostprocessStep | None = None

    @property
    def deadline_ms(self) -> int:
        """The route's deadline for a request: the default of a route."""
        return DEADLINE_MS

    @property
    def labelled(self) -> set[str]:
        """The models with a label file."""
        if not self.settings.has_labels:
            return set()
        return {self.last.model} if self.last else {self.names.network, self.names.pinned, self.names.route}

    def configs(self) -> dict[str, dict[str, str]]:
        """Return the configs of all models by profile, in load order; the route is last.

        The plain config has the profile "".
        """
        network, preprocess, pinned, route = self.names
        return {
            network: {
                "": self._text("Images in, the outputs of the network out.", self._network(ON_CPU)),
                "gpu": self._text("On a GPU: the input stays in GPU memory.", self._network(ON_GPU)),
            },
            preprocess: {
                "": self._text("Encoded images to the network's input.", self._preprocess(ON_CPU)),
                "gpu": self._text("On a GPU: JPEGs are decoded there.", self._preprocess(ON_GPU)),
            },
            **({self.last.model: {"": self._text(*self._after(self.last))}} if self.last else {}),
            pinned: {
                "": self._text(STEPS, self._ensemble()),
                "cpu": self._text(f"On a CPU: {IN_ONE_PROCESS}", self._fused(ON_CPU)),
                "gpu": self._text(f"On a GPU: {IN_ONE_PROCESS}", self._fused(ON_GPU)),
            },
            route: {"": self._text(PUBLIC, self._route())},
        }

    def _text(self, head: str, document: Document) -> str:
        """Return the text of a config; a model with instances of its own forms batches."""
        comments = dict(COMMENTS)
        if not self.settings.can_batch and document["name"] != self.names.route:
            comments["instance_group"] = NO_BATCHES_COMMENT
        if document.get("dynamic_batching"):
            comments["dynamic_batching"] = SMALL_BATCHES_COMMENT
        message = json_format.ParseDict(document, empty_config())
        return pbtxt.format_config(message, f"# {head}", comments)

    def _batch(self, group: Mapping[str, Any]) -> int:
        largest = GPU_BATCH if group == ON_GPU else CPU_BATCH
        return largest if self.settings.can_batch else 1

    def _model(self, name: str, backend: str, group: Mapping[str, Any], **fields: Any) -> Document:
        """Return the config of a model with instances, which forms batches of images."""
        count = {"count": self.settings.instances} if self.settings.instances and group == ON_CPU else {}
        batching = {"dynamic_batching": {} if group == ON_GPU else SMALL_BATCHES}
        return {
            "name": name,
            "backend": backend,
            "max_batch_size": self._batch(group),
            "version_policy": VERSION,
            "instance_group": [{**group, **count}],
            **(batching if self.settings.can_batch else {}),
            **fields,
        }

    def _network(self, group: Mapping[str, Any]) -> Document:
        image, name = self.settings.image, self.names.network
        document = self._model(
            name,
            "onnxruntime",
            group,
            input=[_tensor(image)],
            output=[self._output(output, name) for output in self.settings.outputs],
            version_policy=ALL_VERSIONS,
        )
        if group == ON_GPU:
            cuda = {"gpu_execution_accelerator": [{"name": "cuda", "parameters": CUDA}]}
            more = {"parameters": _texts(NETWORK_ON_GPU), "optimization": {"execution_accelerators": cuda}}
            return document | more
        zeros = {**_kind(image), "zero_data": True}
        sizes = range(1, self._batch(group) + 1)
        warm_up = [{"name": str(n), "batch_size": n, "inputs": {image.name: zeros}} for n in sizes]
        return document | {"model_warmup": warm_up}

    def _preprocess(self, group: Mapping[str, Any]) -> Document:
        output, parameters = [_tensor(self.settings.image)], _texts(self.settings.parameters)
        name = self.names.preprocess
        return self._model(name, "preprocess", group, input=[IMAGE], output=output, parameters=parameters)

    def _after(self, step: PostprocessStep) -> tuple[str, Document]:
        parts = {"preprocess": self.names.preprocess, "preprocess_version": "1", **step.parameters}
        return "Post-processing: outputs of the network to those of the pinned model.", self._model(
            step.model,
            step.backend,
            ON_CPU,
            input=[IMAGE, *map(_tensor, self.settings.outputs)],
            output=self._results(step.model),
            parameters=_texts(parts),
        )

    def _fused(self, group: Mapping[str, Any]) -> Document:
        parts = {"preprocess": self.names.preprocess, "network": self.names.network}
        parts |= {"after": self.last.model} if self.last else {}
        parts |= {f"{key}_version": "1" for key in parts}
        results, name = self._results(self.names.pinned), self.names.pinned
        return self._model(name, "fused", group, input=[IMAGE], output=results, parameters=_texts(parts))

    def _ensemble(self) -> Document:
        image, name = {contract.IMAGE: contract.IMAGE}, self.settings.image.name
        inner = {output.name: f"output_{index}" for index, output in enumerate(self.settings.outputs)}
        if not self.last:
            inner = {self.settings.outputs[0].name: self.output}
        steps = [
            _step(self.names.preprocess, image, {name: "input"}),
            _step(self.names.network, {name: "input"}, inner),
        ]
        if self.last:
            made = {output.name: output.name for output in self.last.outputs}
            steps.append(_step(self.last.model, image | inner, made))
        return {
            "name": self.names.pinned,
            "platform": "ensemble",
            "max_batch_size": self._batch(ON_CPU),
            "input": [IMAGE],
            "output": self._results(self.names.pinned),
            "version_policy": VERSION,
            "ensemble_scheduling": {"step": steps},
        }

    def _route(self) -> Document:
        texts = (_tensor(ServedTensor(name, "TYPE_STRING", (1,))) for name in contract.ROUTE_OUTPUTS)
        return {
            "name": self.names.route,
            "backend": "ab_router",
            "max_batch_size": self._batch(ON_CPU),
            "input": [IMAGE],
            "output": [*self._results(self.names.route), *texts],
            "version_policy": VERSION,
            "instance_group": [ON_CPU],
            "parameters": _texts({"route": f"{self.names.route}.route.json"}),
        }

    def _results(self, model: str) -> list[Document]:
        """Return the outputs of the pinned model and its route."""
        first = self.settings.outputs[0]._replace(name=self.output)
        return [self._output(output, model) for output in (self.last.outputs if self.last else (first,))]

    def _output(self, tensor: ServedTensor, model: str) -> Document:
        has_labels = not self.last and model in self.labelled
        return _tensor(tensor) | ({"label_filename": "labels.txt"} if has_labels else {})


def _kind(tensor: ServedTensor) -> Document:
    """Return datatype and dims of a tensor; a config must have dims."""
    if tensor.dims:
        return {"data_type": tensor.datatype, "dims": list(tensor.dims)}
    return {"data_type": tensor.datatype, "dims": [1], "reshape": {"shape": []}}


def _tensor(tensor: ServedTensor) -> Document:
    return {"name": tensor.name, **_kind(tensor)}


IMAGE = _tensor(ServedTensor(contract.IMAGE, "TYPE_STRING", (1,)))


def _texts(parameters: Mapping[str, str]) -> Document:
    return {key: {"string_value": text} for key, text in parameters.items()}


def _step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Document:
    return {"model_name": model, "model_version": 1, "input_map": inputs, "output_map": outputs}
