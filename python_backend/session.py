"""An ONNX Runtime session built from a model's config.pbtxt, as NVIDIA's backend builds it."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from python_backend.errors import InferenceFailed, InvalidConfig
from python_backend.model_config import ModelConfig

# Triton's `optimization.graph.level` is not ONNX Runtime's numbering.
# Source: onnxruntime_backend r24.10, src/onnxruntime.cc, ModelState::LoadModel.
GRAPH_LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
# Ours, not NVIDIA's: the prefix keeps it apart, and NVIDIA's backend ignores it.
RUN_BATCH_SIZE = "nereid.run_batch_size"
EXECUTION_MODES = {
    "0": onnxruntime.ExecutionMode.ORT_SEQUENTIAL,
    "1": onnxruntime.ExecutionMode.ORT_PARALLEL,
}


class Session:
    """One network, ready to run; inputs and outputs carry the names of the ONNX file.

    `run_batch_size` bounds how many rows go through the network at once, 0 for no bound: on a CPU the
    activations of a large batch fall out of the cache, and its images cost more than those of a small one.
    """

    def __init__(self, path: Path, options: onnxruntime.SessionOptions, run_batch_size: int = 0) -> None:
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's own exceptions share no base class
            raise InvalidConfig(f"onnx runtime cannot load '{path}': {error}") from None
        self._run_batch_size = run_batch_size or sys.maxsize
        self.input_names = [node.name for node in self._session.get_inputs()]
        self.output_names = [node.name for node in self._session.get_outputs()]

    @classmethod
    def from_config(cls, config: ModelConfig) -> "Session":
        """Open the model file of `config`'s version.

        Raises:
            InvalidConfig: no such file, not loadable, or its inputs and outputs are not those of the config.
        """
        path = config.folder / str(config.version) / config.model_filename
        if not path.exists():
            raise InvalidConfig(f"unable to find '{path}' for model instance '{config.name}'")
        # Without a batch dimension there is nothing to split.
        run_batch_size = _count(config, RUN_BATCH_SIZE) if config.max_batch_size else 0
        session = cls(path, session_options(config), run_batch_size)
        session._check_names("input", [t.name for t in config.inputs], session.input_names)
        session._check_names("output", [t.name for t in config.outputs], session.output_names)
        return session

    def run(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> list[np.ndarray]:
        """Run the network on one batch; returns one array per name in `outputs`.

        Raises:
            InferenceFailed: ONNX Runtime refused or failed.
        """
        rows = max((len(array) for array in inputs.values() if array.ndim), default=0)
        if rows <= self._run_batch_size:
            return self._run(inputs, outputs)
        parts = [
            self._run({n: a[start : start + self._run_batch_size] for n, a in inputs.items()}, outputs)
            for start in range(0, rows, self._run_batch_size)
        ]
        return [np.concatenate(results) for results in zip(*parts, strict=True)]

    def run_requests(
        self, inputs: Sequence[str], requests: Sequence[Sequence[np.ndarray]], outputs: Sequence[str]
    ) -> list[list[np.ndarray] | InferenceFailed]:
        """Run several requests together, joined along the batch dimension in groups of `run_batch_size` rows.

        Args:
            inputs: names of the inputs.
            requests: per request one array per input, [N, ...]; N may differ between requests.
            outputs: names of the wanted outputs.

        Returns:
            Per request one array per output, or why its group failed.
        """
        outcomes: list[list[np.ndarray] | InferenceFailed] = []
        for group in self._groups(requests):
            try:
                outcomes += self._run_group(inputs, group, outputs)
            except InferenceFailed as error:
                outcomes += [error] * len(group)
        return outcomes

    def _groups(self, requests: Sequence[Sequence[np.ndarray]]) -> Iterator[list[Sequence[np.ndarray]]]:
        group: list[Sequence[np.ndarray]] = []
        rows = 0
        for arrays in requests:
            if group and rows + len(arrays[0]) > self._run_batch_size:
                yield group
                group, rows = [], 0
            group.append(arrays)
            rows += len(arrays[0])
        if group:
            yield group

    def _run_group(
        self, inputs: Sequence[str], group: list[Sequence[np.ndarray]], outputs: Sequence[str]
    ) -> list[list[np.ndarray]]:
        if len(group) == 1:
            return [self.run(dict(zip(inputs, group[0], strict=True)), outputs)]
        columns = zip(*group, strict=True)
        results = self.run(dict(zip(inputs, map(np.concatenate, columns), strict=True)), outputs)
        splits = np.cumsum([len(arrays[0]) for arrays in group])[:-1]
        return [list(parts) for parts in zip(*(np.split(result, splits) for result in results), strict=True)]

    def _run(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> list[np.ndarray]:
        try:
            return list(self._session.run(outputs, inputs))
        except Exception as error:  # ONNX Runtime's own exceptions share no base class
            raise InferenceFailed(f"onnx runtime error: {error}") from None

    @staticmethod
    def _check_names(what: str, expected: Sequence[str], present: Sequence[str]) -> None:
        for name in expected:
            if name not in present:
                allowed = ", ".join(sorted(present))
                raise InvalidConfig(f"unexpected inference {what} '{name}', allowed {what}s are: {allowed}")


def session_options(config: ModelConfig) -> onnxruntime.SessionOptions:
    """Translate the parameters and optimization settings of `config`.

    Raises:
        InvalidConfig: a value is not one that ONNX Runtime knows.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = GRAPH_LEVELS.get(
        config.graph_level, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    )
    mode = config.parameters.get("execution_mode", "0")
    if mode not in EXECUTION_MODES:
        expected = "Expected values for  execution_mode are 0 or 1"
        raise InvalidConfig(f"Invalid configuration value provided. {expected} but got {mode} .")
    options.execution_mode = EXECUTION_MODES[mode]
    options.intra_op_num_threads = _count(config, "intra_op_thread_count")
    options.inter_op_num_threads = _count(config, "inter_op_thread_count")
    return options


def _count(config: ModelConfig, name: str) -> int:
    text = config.parameters.get(name, "0")
    try:
        return max(0, int(text))
    except ValueError:
        raise InvalidConfig(f"failed to convert '{text}' to integral number") from None
