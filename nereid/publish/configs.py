"""Configs for an added model: its network, preprocessing, last step, pinned model and route."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from google.protobuf.text_encoding import CEscape

from nereid import contract
from nereid.routing.assignment import DEADLINE_MS

CPU_BATCH, GPU_BATCH = 8, 64
IMAGE = f'input {{ name: "{contract.IMAGE}" data_type: TYPE_STRING dims: [ 1 ] }}'
VERSION = "version_policy { specific { versions: [ 1 ] } }"
# A new version then needs only a folder: a changed config may make Triton reload the other versions.
ALL_VERSIONS = "version_policy { all {} }"
# Each instance has a stream of its own: one runs while the other receives its batch.
ON_GPU = "instance_group { kind: KIND_GPU count: 2 }"
NETWORK_ON_GPU = """\
# Without this, Triton first copies every input of a Python-based backend to the host.
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }
# The defaults try all algorithms in the first run of every batch size, and double the memory at each growth.
optimization { execution_accelerators { gpu_execution_accelerator { name: "cuda" \
parameters { key: "cudnn_conv_algo_search" value: "HEURISTIC" } \
parameters { key: "arena_extend_strategy" value: "kSameAsRequested" } } } }
# If the whole network runs on the GPU, each power of two of rows is recorded at load.
parameters { key: "nereid.cuda_graphs" value { string_value: "true" } }
# A batch that does not fit into memory is run in halves.
parameters { key: "nereid.halve_batch_if_out_of_memory" value { string_value: "true" } }
"""
SMALL_BATCHES = (
    "# Small batches, so that every instance gets queued requests.",
    "dynamic_batching { preferred_batch_size: [ 2, 4 ] }",
)
ROUTE_OUTPUTS = [
    f'output {{ name: "{name}" data_type: TYPE_STRING dims: [ 1 ] }}' for name in contract.ROUTE_OUTPUTS
]


class Tensor(NamedTuple):
    """A tensor of the network: name, Triton's datatype, dims without the batch."""

    name: str
    datatype: str
    dims: tuple[int, ...]

    @property
    def kind(self) -> str:
        """Return datatype and dims as a config contains them."""
        if not self.dims:  # a config cannot have no dims
            return f"data_type: {self.datatype} dims: [ 1 ] reshape {{ shape: [ ] }}"
        return f"data_type: {self.datatype} dims: [ {', '.join(map(str, self.dims))} ]"


class Names(NamedTuple):
    """Names of the models behind one public name, and the route with that name."""

    network: str
    preprocess: str
    pinned: str
    route: str

    @classmethod
    def behind(cls, route: str) -> "Names":
        """Return the names for a route; the pinned model runs version 1 of both others."""
        return cls(f"{route}_network", f"{route}_preprocess", f"{route}_v1", route)


class Properties(NamedTuple):
    """Properties that the models of an addition share.

    Args:
        parameters: those of the preprocessing.
        has_labels: whether there are class names.
        can_batch: whether the network computes several rows at a time.
        instances: processes of the pinned model on a CPU; None for those that fit the machine.
        companions: default models that the pinned model uses, too, and their versions.
    """

    parameters: Mapping[str, str]
    has_labels: bool
    can_batch: bool
    instances: int | None
    companions: Mapping[str, int]


class Models(Protocol):
    """The models of an addition."""

    @property
    def labelled(self) -> set[str]:
        """The models with a label file."""

    @property
    def deadline_ms(self) -> int:
        """The time that the route gives a request."""

    def configs(self) -> dict[str, dict[str, str]]:
        """Return the configs of all models by profile, in the order of their loading; the route is last.

        The plain config has the profile "".
        """


class LastStep(NamedTuple):
    """A model that turns the outputs of a network, and the image, into those of the pinned model."""

    model: str
    backend: str
    outputs: tuple[Tensor, ...]
    parameters: tuple[tuple[str, str], ...]


class Addition(NamedTuple):
    """A network with a public name: its tensors, its preprocessing, and its last step."""

    names: Names
    input: Tensor
    outputs: tuple[Tensor, ...]
    properties: Properties
    last: LastStep | None = None

    @property
    def deadline_ms(self) -> int:
        """The default of a route."""
        return DEADLINE_MS

    @property
    def labelled(self) -> set[str]:
        """The models with a label file."""
        if not self.properties.has_labels:
            return set()
        return {self.last.model} if self.last else {self.names.network, self.names.pinned, self.names.route}

    def configs(self) -> dict[str, dict[str, str]]:
        """Return the configs of all models by profile; the plain config has the profile ""."""
        on_gpu = GPU_BATCH if self.properties.can_batch else 1
        return {
            self.names.network: {
                "": self._network("Images in, scores out.", self._batch, self._on_cpu, *self._warm_up),
                "gpu": self._network("On a GPU: the input stays in GPU memory.", on_gpu, ON_GPU)
                + NETWORK_ON_GPU,
            },
            self.names.preprocess: {
                "": self._preprocess("Encoded images to the network's input.", self._batch, self._on_cpu),
                "gpu": self._preprocess("On a GPU: JPEGs are decoded there.", on_gpu, ON_GPU),
            },
            **({self.last.model: {"": self._last(self.last)}} if self.last else {}),
            self.names.pinned: {
                "": self._pinned(),
                "cpu": self._fused("On a CPU", self._batch, self._on_cpu),
                "gpu": self._fused("On a GPU", on_gpu, ON_GPU),
            },
            self.names.route: {"": self._route()},
        }

    @property
    def _batch(self) -> int:
        return CPU_BATCH if self.properties.can_batch else 1

    @property
    def _on_cpu(self) -> str:
        instances = self.properties.instances
        count = f" count: {instances}" if instances else ""
        return f"instance_group {{ kind: KIND_CPU{count} }}"

    def _batching(self, instances: str) -> Sequence[str]:
        if not self.properties.can_batch:
            return ["# The network computes one image at a time."]
        return ["dynamic_batching {}"] if instances == ON_GPU else SMALL_BATCHES

    @property
    def _warm_up(self) -> list[str]:
        return [
            "# Every batch size is a new shape, and its first run is slow.",
            *(
                f'model_warmup {{ name: "{size}" batch_size: {size} inputs {{ '
                f"key: {_quoted(self.input.name)} value {{ {self.input.kind} zero_data: true }} }} }}"
                for size in range(1, self._batch + 1)
            ),
        ]

    def _network(self, comment: str, batch: int, instances: str, *more: str) -> str:
        return _config(
            f"# {comment}",
            f"name: {_quoted(self.names.network)}",
            'backend: "onnxruntime"',
            f"max_batch_size: {batch}",
            f"input {{ name: {_quoted(self.input.name)} {self.input.kind} }}",
            *(self._output(each, self.names.network) for each in self.outputs),
            ALL_VERSIONS,
            instances,
            *self._batching(instances),
            *more,
        )

    def _preprocess(self, comment: str, batch: int, instances: str) -> str:
        return _config(
            f"# {comment}",
            f"name: {_quoted(self.names.preprocess)}",
            'backend: "preprocess"',
            f"max_batch_size: {batch}",
            IMAGE,
            f"output {{ name: {_quoted(self.input.name)} {self.input.kind} }}",
            VERSION,
            instances,
            *self._batching(instances),
            parameters=[*self.properties.parameters.items()],
        )

    def _pinned(self) -> str:
        image, name = (contract.IMAGE, contract.IMAGE), self.input.name
        inner = [(each.name, f"output_{place}") for place, each in enumerate(self.outputs)]
        if not self.last:
            inner = [(inner[0][0], contract.SCORES)]
        steps = [
            _step(self.names.preprocess, [image], [(name, "input")]),
            _step(self.names.network, [(name, "input")], inner),
        ]
        if self.last:
            made = [(each.name, each.name) for each in self.last.outputs]
            steps.append(_step(self.last.model, [image, *inner], made))
        return _config(
            "# Preprocessing, then version 1 of the network. `cpu` and `gpu` run all in one process instead.",
            f"name: {_quoted(self.names.pinned)}",
            'platform: "ensemble"',
            f"max_batch_size: {self._batch}",
            IMAGE,
            *self._results(self.names.pinned),
            VERSION,
            "ensemble_scheduling {",
            *steps,
            "}",
        )

    def _last(self, last: LastStep) -> str:
        before = {"preprocess": self.names.preprocess, "preprocess_version": "1"}
        return _config(
            "# The last step: outputs of the network to those of the pinned model.",
            f"name: {_quoted(last.model)}",
            f'backend: "{last.backend}"',
            f"max_batch_size: {self._batch}",
            IMAGE,
            *(f"input {{ name: {_quoted(each.name)} {each.kind} }}" for each in self.outputs),
            *self._results(last.model),
            VERSION,
            self._on_cpu,
            *self._batching(self._on_cpu),
            parameters=[*before.items(), *last.parameters],
        )

    def _fused(self, where: str, batch: int, instances: str) -> str:
        parts = {"preprocess": self.names.preprocess, "network": self.names.network}
        parts |= {"after": self.last.model} if self.last else {}
        return _config(
            f"# {where}: the models that config.pbtxt names as steps, in one process.",
            f"name: {_quoted(self.names.pinned)}",
            'backend: "fused"',
            f"max_batch_size: {batch}",
            IMAGE,
            *self._results(self.names.pinned),
            VERSION,
            instances,
            *self._batching(instances),
            parameters=[p for key, name in parts.items() for p in ((key, name), (f"{key}_version", "1"))],
        )

    def _route(self) -> str:
        return _config(
            "# The public name: an A/B route between the pinned models.",
            f"name: {_quoted(self.names.route)}",
            'backend: "ab_router"',
            f"max_batch_size: {self._batch}",
            IMAGE,
            *self._results(self.names.route),
            *ROUTE_OUTPUTS,
            VERSION,
            "instance_group { kind: KIND_CPU }",
            parameters=[("route", f"{self.names.route}.route.json")],
        )

    def _results(self, model: str) -> list[str]:
        """Return the outputs of the pinned model and its route."""
        results = self.last.outputs if self.last else (self.outputs[0]._replace(name=contract.SCORES),)
        return [self._output(each, model) for each in results]

    def _output(self, tensor: Tensor, model: str) -> str:
        has_labels = not self.last and model in self.labelled
        labels = ' label_filename: "labels.txt"' if has_labels else ""
        return f"output {{ name: {_quoted(tensor.name)} {tensor.kind}{labels} }}"


def _config(*lines: str, parameters: Sequence[tuple[str, str]] = ()) -> str:
    entries = (
        f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(text)} }} }}"
        for key, text in parameters
    )
    return "".join(f"{line}\n" for line in (*lines, *entries))


Pairs = Sequence[tuple[str, str]]


def _step(model: str, input_map: Pairs, output_map: Pairs) -> str:
    maps = "".join(
        f"    {side} {{ key: {_quoted(key)} value: {_quoted(value)} }}\n"
        for side, pairs in (("input_map", input_map), ("output_map", output_map))
        for key, value in pairs
    )
    return f"  step {{\n    model_name: {_quoted(model)}\n    model_version: 1\n{maps}  }}"


def _quoted(text: str) -> str:
    """Return a string in the text format of protobuf, with any characters."""
    return f'"{CEscape(text, as_utf8=True)}"'
