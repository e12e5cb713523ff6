"""Configs for an added model: its network, preprocessing, pinned model and route."""

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.text_encoding import CEscape

from nereid import contract

CPU_BATCH, GPU_BATCH = 8, 64
CPU_INSTANCES = 2
IMAGE = f'input {{ name: "{contract.IMAGE}" data_type: TYPE_STRING dims: [ 1 ] }}'
VERSION = "version_policy { specific { versions: [ 1 ] } }"
# A new version then needs only a folder: a changed config may make Triton reload the other versions.
ALL_VERSIONS = "version_policy { all {} }"
ON_CPU = f"instance_group {{ kind: KIND_CPU count: {CPU_INSTANCES} }}"
ON_GPU = "instance_group { kind: KIND_GPU count: 1 }"
ROUTE_OUTPUTS = "\n".join(
    f'output {{ name: "{name}" data_type: TYPE_STRING dims: [ 1 ] }}' for name in contract.ROUTE_OUTPUTS
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the network: name, Triton's datatype, dims without the batch."""

    name: str
    datatype: str
    dims: tuple[int, ...]

    def declare(self, side: str, more: str = "", name: str = "") -> str:
        """Return the entry `input` or `output` for the tensor, under its own or another name."""
        return (
            f"{side} {{ name: {_quoted(name or self.name)} data_type: {self.datatype} "
            f"dims: [ {', '.join(map(str, self.dims))} ]{more} }}"
        )


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the models behind one public name."""

    route: str

    @property
    def network(self) -> str:
        """Return the name of the network."""
        return f"{self.route}_network"

    @property
    def preprocess(self) -> str:
        """Return the name of the preprocessing."""
        return f"{self.route}_preprocess"

    @property
    def pinned(self) -> str:
        """Return the name of the pinned model with the first version of both."""
        return f"{self.route}_v1"


@dataclass(frozen=True, slots=True)
class Addition:
    """A network with a public name: its input and output, and the parameters of its preprocessing."""

    names: Names
    input: Tensor
    output: Tensor
    parameters: tuple[tuple[str, str], ...]
    has_labels: bool

    @property
    def _labels(self) -> str:
        return ' label_filename: "labels.txt"' if self.has_labels else ""

    @property
    def _scores_output(self) -> str:
        return self.output.declare("output", self._labels, contract.SCORES)

    def network(self) -> str:
        """Return the config of the network on the CPU."""
        return self._network("Images in, scores out.", CPU_BATCH, ON_CPU)

    def network_on_gpu(self) -> str:
        """Return the config of the network on a GPU."""
        return (
            self._network("On a GPU: the input stays in GPU memory.", GPU_BATCH, ON_GPU)
            + "# Without this, Triton first copies every input of a Python-based backend to the host.\n"
            + _parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no")
            + "# The default tries all algorithms in the first run of every batch size.\n"
            + 'optimization { execution_accelerators { gpu_execution_accelerator { name: "cuda" '
            + 'parameters { key: "cudnn_conv_algo_search" value: "HEURISTIC" } } } }\n'
        )

    def preprocess(self) -> str:
        """Return the config of the preprocessing on the CPU."""
        return self._preprocess("Encoded images to the network's input.", CPU_BATCH, ON_CPU)

    def preprocess_on_gpu(self) -> str:
        """Return the config of the preprocessing on a GPU."""
        return self._preprocess("On a GPU: JPEGs are decoded there.", GPU_BATCH, ON_GPU)

    def pinned(self) -> str:
        """Return the config of the pinned model as an ensemble."""
        names = self.names
        return _lines(
            "# Preprocessing, then version 1 of the network. Profile `cpu` runs both in one process instead.",
            f"name: {_quoted(names.pinned)}",
            'platform: "ensemble"',
            f"max_batch_size: {CPU_BATCH}",
            IMAGE,
            self._scores_output,
            VERSION,
            "ensemble_scheduling {",
            _step(names.preprocess, (contract.IMAGE, contract.IMAGE), (self.input.name, "input")),
            _step(names.network, (self.input.name, "input"), (self.output.name, contract.SCORES)),
            "}",
        )

    def pinned_on_cpu(self) -> str:
        """Return the config of the pinned model as one process."""
        names = self.names
        return _lines(
            "# On a CPU: the models that config.pbtxt names as steps, in one process.",
            f"name: {_quoted(names.pinned)}",
            'backend: "fused"',
            f"max_batch_size: {CPU_BATCH}",
            IMAGE,
            self._scores_output,
            VERSION,
            ON_CPU,
            "# Small batches, so that every instance gets queued requests.",
            "dynamic_batching { preferred_batch_size: [ 2, 4 ] }",
        ) + "".join(
            _parameter(key, value)
            for key, value in [
                ("preprocess", names.preprocess),
                ("preprocess_version", "1"),
                ("network", names.network),
                ("network_version", "1"),
            ]
        )

    def route(self) -> str:
        """Return the config of the route."""
        return _lines(
            "# The public name: an A/B route between the pinned models.",
            f"name: {_quoted(self.names.route)}",
            'backend: "ab_router"',
            f"max_batch_size: {CPU_BATCH}",
            IMAGE,
            self._scores_output,
            ROUTE_OUTPUTS,
            VERSION,
            "instance_group { kind: KIND_CPU count: 1 }",
        ) + _parameter("route", f"{self.names.route}.route.json")

    def _network(self, what: str, batch: int, instances: str) -> str:
        return _lines(
            f"# {what}",
            f"name: {_quoted(self.names.network)}",
            'backend: "onnxruntime"',
            f"max_batch_size: {batch}",
            self.input.declare("input"),
            self.output.declare("output", self._labels),
            ALL_VERSIONS,
            instances,
            "dynamic_batching {}",
            "# Every batch size is a new shape, and its first run is slow.",
            *(self._warm_up(size) for size in range(1, batch + 1)),
        )

    def _warm_up(self, size: int) -> str:
        dims = ", ".join(map(str, self.input.dims))
        return (
            f'model_warmup {{ name: "{size}" batch_size: {size} inputs {{ '
            f"key: {_quoted(self.input.name)} value {{ data_type: {self.input.datatype} "
            f"dims: [ {dims} ] zero_data: true }} }} }}"
        )

    def _preprocess(self, what: str, batch: int, instances: str) -> str:
        return _lines(
            f"# {what}",
            f"name: {_quoted(self.names.preprocess)}",
            'backend: "preprocess"',
            f"max_batch_size: {batch}",
            IMAGE,
            self.input.declare("output"),
            VERSION,
            instances,
            "dynamic_batching {}",
        ) + "".join(_parameter(key, value) for key, value in self.parameters)


def _step(model: str, input_map: Sequence[str], output_map: Sequence[str]) -> str:
    maps = "".join(
        f"    {side} {{ key: {_quoted(key)} value: {_quoted(value)} }}\n"
        for side, (key, value) in (("input_map", input_map), ("output_map", output_map))
    )
    return f"  step {{\n    model_name: {_quoted(model)}\n    model_version: 1\n{maps}  }}"


def _parameter(key: str, value: str) -> str:
    return f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}\n"


def _quoted(text: str) -> str:
    """Return a string in the text format of protobuf, with any characters."""
    return f'"{CEscape(text, as_utf8=True)}"'


def _lines(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)
