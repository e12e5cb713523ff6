"""Instances of models of the `text_reader` backend: encoded images to lines of text.

The networks run in the same process, or as models of the server; the code around them is the same.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nereid.backends.routing import deadline
from nereid.backends.triton.metric_reporter import ImageSignals, MetricReporter
from nereid.backends.triton.model_trace import ModelTracer
from nereid.backends.triton.onnx_model import LocalNetwork, ServedNetwork
from nereid.backends.triton.post_processing import Outcome, only_one
from nereid.backends.triton.tensors import read_request, reject, respond
from nereid.base.config.model_config import ModelConfig
from nereid.base.contract import BARCODE, BARCODE_BOX, BOX, CONFIDENCE, FIELD, SYMBOLOGY, TEXT
from nereid.base.errors import InvalidConfig, ServingError, from_exception
from nereid.tasks.read.characters import Characters, RecognisedLine
from nereid.tasks.read.fields.field_search import FoundField, find_fields, missing_fields
from nereid.tasks.read.fields.specification import read_specification
from nereid.tasks.read.metrics import FAMILIES, PREFIX
from nereid.tasks.read.reading_settings import (
    ReadingSettings,
    fields_path,
    own_problems,
    reads_barcodes,
    tensor_problems,
)
from nereid.tasks.read.stages import StageTimes
from nereid.vision.imaging.decode import Limits
from nereid.vision.imaging.image_times import ProbeImage
from nereid.vision.inference import network_file

if TYPE_CHECKING:
    from nereid.tasks.read.barcodes import FoundBarcode


class ReaderMetrics(MetricReporter):
    """Metrics of one reader."""

    def __init__(self, model: str, version: int) -> None:
        super().__init__(PREFIX, FAMILIES, model=model, version=str(version))

    def read(self, stages_ms: Mapping[str, float], lines: int, missing: Sequence[str]) -> None:
        """Observe the time of each stage of one image, its lines, and its missing required fields."""
        self.add("lines", lines)
        for field in missing:
            self.add("missing_fields_total", field=field)
        for stage, milliseconds in stages_ms.items():
            self.add("stage_duration_seconds", milliseconds / 1e3, stage=stage)

    def rejected(self, error: ServingError) -> None:
        """Count a request that was rejected."""
        self.add("rejected_total", reason=error.code.lower())


class ReaderModel:
    """One instance: one image per request, one outcome per request; raises InvalidConfig."""

    def __init__(self, config: ModelConfig) -> None:
        try:  # here, because OpenCV and ZXing are installed only where text is read
            from nereid.tasks.read.reader import Networks, TextReader
        except ImportError as error:
            raise InvalidConfig(
                f"model '{config.name}': {error}; fix: pip install 'nereid-serving[text]'"
            ) from None
        settings = config.settings(ReadingSettings)
        path = fields_path(config, settings)
        self._specification = read_specification(path) if path else None
        self._reads_barcodes = reads_barcodes(config)
        if problem := next(own_problems(config, settings), ""):
            raise InvalidConfig(f"model '{config.name}': {problem}")
        siblings = {part: config.sibling(*pinned) for part, pinned in settings.parts.items()}
        for part, network in siblings.items():
            if problem := next(tensor_problems(part, network), ""):
                raise InvalidConfig(f"model '{config.name}': {problem}")
        self._networks = {
            part: LocalNetwork(config, network.replacing(settings.of_network))
            if settings.is_in_process
            else ServedNetwork(network)
            for part, network in siblings.items()
        }
        detect, direction, recognise = (self._networks[part] for part in ("detect", "direction", "network"))

        def networks(traceparent: str = "") -> Networks:
            return Networks(
                lambda tensor: detect(tensor, traceparent)[0],
                lambda tensor: direction(tensor, traceparent)[0],
                lambda tensor: _pair(recognise(tensor, traceparent)),
            )

        self._networks_in = networks
        self._signals = ImageSignals(config)
        self._reader = TextReader(
            networks(),
            Characters.from_file(network_file.path_of(siblings["network"])),
            Limits(settings.max_image_bytes, settings.max_image_pixels, settings.max_image_side_px),
            settings.min_confidence,
            self._signals.sink,
            settings.max_lines,
            settings.max_read_s,
            self._reads_barcodes,
        )
        self._is_batching = config.max_batch_size > 0
        self._metrics = ReaderMetrics(config.name, config.version)
        self._tracer = ModelTracer(config, begins=True)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Read the images of all requests together."""
        trace = self._tracer.begin(requests)
        read = [*map(_read, requests)]
        images, checks = [image for image, _ in read], [check for _, check in read]
        networks = [*map(self._networks_in, trace.traceparents)] if trace else None
        found = self._reader.read(images, checks, networks)
        outcomes = [*map(self._outcome, images, found, self._reader.barcodes, self._reader.times)]
        responses = [self._respond(each) for each in outcomes]
        if trace:
            trace.prepared([[times] for times in self._reader.times])
            trace.end(outcomes)
        return responses

    def close(self) -> None:
        """Report the end of the instance."""
        self._tracer.close()
        self._metrics.close()
        self._signals.close()
        for network in self._networks.values():
            network.close()

    def _outcome(
        self,
        image: bytes | ServingError,
        found: list[RecognisedLine] | ServingError,
        barcodes: Sequence["FoundBarcode"],
        times: StageTimes,
    ) -> Outcome:
        try:
            if isinstance(found, ServingError):
                raise found
            tensors, missing = _tensors(found), list[str]()
            if self._reads_barcodes:
                tensors |= _barcode_tensors(barcodes)
            if self._specification:
                with times.stage("fields"):
                    fields = find_fields(
                        found, self._specification, [(each.text, each.box) for each in barcodes]
                    )
                    tensors[FIELD] = _texts(map(_json, fields))
                    missing = missing_fields(fields, self._specification)
        except Exception as raised:  # an exception that leaves `execute` fails the whole batch
            error = from_exception(raised)
            self._metrics.rejected(error)
            return error
        if not isinstance(image, ProbeImage):
            self._metrics.read(times.milliseconds(), len(found), missing)
        return tensors

    def _respond(self, outcome: Outcome) -> Any:
        if isinstance(outcome, ServingError):
            return reject(outcome)
        return respond(**{name: each[None] if self._is_batching else each for name, each in outcome.items()})


def _pair(outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    index, probability = outputs
    return index, probability


def _tensors(lines: Sequence[RecognisedLine]) -> dict[str, np.ndarray]:
    return {
        TEXT: _texts(line.text for line in lines),
        CONFIDENCE: np.array([line.confidence for line in lines], np.float32),
        BOX: np.array([line.box for line in lines], np.float32).reshape(-1, 4, 2),
    }


def _barcode_tensors(barcodes: Sequence["FoundBarcode"]) -> dict[str, np.ndarray]:
    return {
        BARCODE: _texts(each.text for each in barcodes),
        SYMBOLOGY: _texts(each.symbology for each in barcodes),
        BARCODE_BOX: np.array([each.box for each in barcodes], np.float32).reshape(-1, 4, 2),
    }


def _texts(texts: Iterable[str]) -> np.ndarray:
    return np.array([text.encode() for text in texts], object)


def _json(field: FoundField) -> str:
    return json.dumps(field.document(), ensure_ascii=False)


def _read(request: Any) -> tuple[bytes | ServingError, Callable[[], None]]:
    found, parameters = read_request(request)
    images = only_one(found)
    return images if isinstance(images, ServingError) else images[0], partial(deadline.check, parameters)
