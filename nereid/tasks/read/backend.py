"""Instances of `text_reader` models: convert encoded images to lines of text.

The networks run in this process or as models on the server; the surrounding code is the same.
"""

import importlib.util
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nereid.backends.routing.interfaces import check_deadline
from nereid.backends.triton.metric_reporter import ImageSignalReporter, MetricReporter
from nereid.backends.triton.model_trace import ModelTracer
from nereid.backends.triton.onnx_model import LocalNetwork, ServedNetwork
from nereid.backends.triton.post_processing import PostProcessingOutcome, only_one
from nereid.backends.triton.tensors import read_request, reject, send_or_log, send_response, to_response
from nereid.base.config.model_config import ModelConfig
from nereid.base.contract import (
    BARCODE,
    BARCODE_BOX,
    BARCODE_PAGE,
    BOX,
    CONFIDENCE,
    FIELD,
    PAGE,
    PAGE_SIZE,
    SYMBOLOGY,
    TEXT,
)
from nereid.base.errors import InvalidConfig, Overloaded, ServingError, from_exception
from nereid.tasks.read import READER_PARTS
from nereid.tasks.read.characters import Characters
from nereid.tasks.read.fields.field_search import FoundField, find_fields, missing_fields
from nereid.tasks.read.fields.specification import Specification, read_specification
from nereid.tasks.read.reading_settings import (
    ReadingSettings,
    fields_path,
    has_output,
    own_problems,
    tensor_problems,
)
from nereid.tasks.read.stages import FAMILIES, PREFIX
from nereid.vision.imaging.decode import ImageLimits
from nereid.vision.imaging.formats.image_header import has_pages
from nereid.vision.inference import network_file

if TYPE_CHECKING:
    from nereid.tasks.read.reader import Networks, ReadFile, TextReader

# Maximum documents waiting for an instance; one is read at a time.
MAX_WAITING_DOCUMENTS = 16
# A request's image or its error, and a function that checks its deadline.
_Read = tuple[bytes | ServingError, Callable[[], None]]


class ReaderModel:
    """One instance: one image or document per request, one outcome per request; raises InvalidConfig.

    A thread reads documents page by page, so that images need not wait until a document is finished.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._reads_barcodes, self._reads_pages = has_output(config, BARCODE), has_output(config, PAGE)
        try:  # here, because OpenCV and ZXing are installed only where text is read
            from nereid.tasks.read.reader import TextReader

            if self._reads_pages and not importlib.util.find_spec("pypdfium2"):
                raise ImportError("No module named 'pypdfium2'")
        except ImportError as error:
            raise InvalidConfig(
                f"model '{config.name}': {error}; fix: pip install 'nereid-serving[text]'"
            ) from None
        settings = config.settings(ReadingSettings)
        path = fields_path(config, settings)
        self._specification = read_specification(path) if path else None
        if problem := next(own_problems(config, settings), ""):
            raise InvalidConfig(f"model '{config.name}': {problem}")
        siblings = {part: config.sibling(*pinned) for part, pinned in settings.parts.items()}
        for part, network in siblings.items():
            if problem := next(tensor_problems(part, network), ""):
                raise InvalidConfig(f"model '{config.name}': {problem}")
        self._networks = {
            part: LocalNetwork(config, network.with_parameters(settings.network_overrides))
            if settings.is_in_process
            else ServedNetwork(network)
            for part, network in siblings.items()
        }
        self._parts = [self._alone(self._networks[part]) for part in READER_PARTS]
        self._signals = ImageSignalReporter(config)
        readers = partial(
            TextReader,
            self._networks_in(),
            Characters.from_file(network_file.path_of(siblings["network"])),
            ImageLimits(settings.max_image_bytes, settings.max_image_pixels, settings.max_image_side_px),
            settings.min_confidence,
            self._signals.sink,
            settings.max_lines,
            settings.max_read_s,
            self._reads_barcodes,
        )
        self._is_batching = config.max_batch_size > 0
        self._metrics = MetricReporter(PREFIX, FAMILIES, model=config.name, version=str(config.version))
        self._images = readers(), ModelTracer(config, starts_traces=True)
        self._documents = readers(settings.max_pages), ModelTracer(config, starts_traces=True)
        self._thread = ThreadPoolExecutor(1, "documents")
        self._waiting_slots = threading.BoundedSemaphore(MAX_WAITING_DOCUMENTS)

    def _networks_in(self, traceparent: str = "") -> "Networks":
        """Return the networks; their requests continue the given span."""
        from nereid.tasks.read.reader import Networks

        detect, direction, recognise = self._parts
        return Networks(
            lambda tensor: detect(tensor, traceparent)[0],
            lambda tensor: direction(tensor, traceparent)[0],
            lambda tensor: recognise(tensor, traceparent),
        )

    def _alone(self, network: Callable[..., Sequence[np.ndarray]]) -> Callable[..., Sequence[np.ndarray]]:
        """Wrap a network so that one thread runs it at a time and the caller owns its outputs."""
        if not self._reads_pages:
            return network
        lock = threading.Lock()

        def run(tensor: np.ndarray, traceparent: str) -> Sequence[np.ndarray]:
            with lock:
                return [np.array(output) for output in network(tensor, traceparent)]

        return run

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Read the images of all requests together; None if a document makes it send the responses itself."""
        read = [*map(_read, requests)]
        documents = [self._reads_pages and has_pages(image) for image, _ in read]
        if not any(documents):
            return self._responses(requests, read, *self._images)
        for request, image_read, is_document in zip(requests, read, documents, strict=True):
            if is_document:
                self._begin(request, image_read)
        image_indices = [index for index, is_document in enumerate(documents) if not is_document]
        others = [requests[index] for index in image_indices]
        responses = (
            self._responses(others, [read[index] for index in image_indices], *self._images) if others else []
        )
        for request, response in zip(others, responses, strict=True):
            send_response(request.get_response_sender(), response)
        return None

    def _begin(self, request: Any, read: _Read) -> None:
        """Have the thread read a document and respond."""
        sender = request.get_response_sender()
        if self._waiting_slots.acquire(blocking=False):
            self._thread.submit(self._read_document, request, read, sender)
        else:
            error = Overloaded(f"{MAX_WAITING_DOCUMENTS} documents wait for this instance; retry later")
            self._metrics.record_rejection(error)
            send_response(sender, reject(error))

    def _read_document(self, request: Any, read: _Read, sender: Any) -> None:
        try:
            (response,) = self._responses([request], [read], *self._documents)
        except Exception as error:  # every request needs a response
            response = reject(from_exception(error))
        self._waiting_slots.release()
        send_or_log(sender, response)

    def _responses(
        self, requests: Sequence[Any], read: Sequence[_Read], reader: "TextReader", tracer: ModelTracer
    ) -> list[Any]:
        """Read the images of several requests together; one thread at a time uses a reader and its tracer."""
        trace = tracer.begin(requests)
        images, checks = [image for image, _ in read], [check for _, check in read]
        networks = [*map(self._networks_in, trace.traceparents)] if trace else None
        files = reader.read(images, checks, networks)
        outcomes = [*map(self._outcome, files)]
        responses = [*map(to_response, outcomes)]
        if trace:
            trace.record_preparation([[file.times] for file in files])
            trace.end(outcomes)
        return responses

    def close(self) -> None:
        """Report that the instance is shutting down."""
        self._thread.shutdown()
        for _, tracer in (self._images, self._documents):
            tracer.close()
        self._metrics.close()
        self._signals.close()
        for network in self._networks.values():
            network.close()

    def _outcome(self, file: "ReadFile") -> PostProcessingOutcome:
        try:
            if file.error:
                raise file.error
            tensors, missing = _line_tensors(file), list[str]()
            if self._reads_barcodes:
                tensors |= _barcode_tensors(file)
            if self._reads_pages:
                tensors |= _page_tensors(file)
            if self._specification:
                with file.times.stage("fields"):
                    fields = [*_fields(file, self._specification)]
                tensors[FIELD] = _texts(
                    json.dumps(entry.document() | {"page": page}, ensure_ascii=False)
                    for page, entry in fields
                )
                missing = missing_fields([entry for _, entry in fields], self._specification)
        except Exception as raised:  # an exception that escapes `execute` fails the whole batch
            error = from_exception(raised)
            self._metrics.record_rejection(error)
            return error
        if not file.is_probe:
            self._record(file, missing)
        return {name: rows[None] for name, rows in tensors.items()} if self._is_batching else tensors

    def _record(self, file: "ReadFile", missing: Sequence[str]) -> None:
        """Observe the time of each stage of a file, its line count and its missing required fields."""
        self._metrics.add("lines", len(file.lines))
        for field in missing:
            self._metrics.add("missing_fields_total", field=field)
        for stage, milliseconds in file.times.milliseconds().items():
            self._metrics.add("stage_duration_seconds", milliseconds / 1e3, stage=stage)


def _fields(file: "ReadFile", specification: Specification) -> Iterator[tuple[int, FoundField]]:
    """Yield the fields of each page with its number, from 1."""
    for page in range(1, len(file.sizes_wh) + 1):
        lines = [line for line in file.lines if line.page == page]
        codes = [(barcode.text, barcode.box) for barcode in file.barcodes if barcode.page == page]
        yield from ((page, entry) for entry in find_fields(lines, specification, codes))


def _line_tensors(file: "ReadFile") -> dict[str, np.ndarray]:
    return {
        TEXT: _texts(line.text for line in file.lines),
        CONFIDENCE: np.array([line.confidence for line in file.lines], np.float32),
        BOX: np.array([line.box for line in file.lines], np.float32).reshape(-1, 4, 2),
    }


def _barcode_tensors(file: "ReadFile") -> dict[str, np.ndarray]:
    return {
        BARCODE: _texts(barcode.text for barcode in file.barcodes),
        SYMBOLOGY: _texts(barcode.symbology for barcode in file.barcodes),
        BARCODE_BOX: np.array([barcode.box for barcode in file.barcodes], np.float32).reshape(-1, 4, 2),
    }


def _texts(texts: Iterable[str]) -> np.ndarray:
    return np.array([text.encode() for text in texts], object)


def _page_tensors(file: "ReadFile") -> dict[str, np.ndarray]:
    return {
        PAGE: np.array([line.page for line in file.lines], np.int32),
        BARCODE_PAGE: np.array([barcode.page for barcode in file.barcodes], np.int32),
        PAGE_SIZE: np.array(file.sizes_wh, np.int32).reshape(-1, 2),
    }


def _read(request: Any) -> _Read:
    inputs, parameters = read_request(request)
    images = only_one(inputs)
    return images if isinstance(images, ServingError) else images[0], partial(check_deadline, parameters)
