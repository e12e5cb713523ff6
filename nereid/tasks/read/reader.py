"""Reading of the text on encoded images, with networks that may run anywhere."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import cv2
import numpy as np

from nereid.base.errors import InvalidImage, ServingError, from_exception
from nereid.base.processes import return_memory
from nereid.tasks.read.barcodes import FoundBarcode, find_barcodes
from nereid.tasks.read.boxes import reading_order
from nereid.tasks.read.characters import Characters, RecognisedLine
from nereid.tasks.read.line_images import (
    LINE_HEIGHT_PX,
    UprightDecoder,
    UprightImage,
    batches,
    normalised,
    stacked,
)
from nereid.tasks.read.line_search import FoundLines, Network, find_lines, upside_down
from nereid.tasks.read.reading_settings import DEFAULT_MAX_LINES, DEFAULT_MAX_READ_S
from nereid.tasks.read.stages import StageTimes
from nereid.vision.imaging.decode import Limits
from nereid.vision.imaging.image_signals import ImageMeter, Sink, size_signals
from nereid.vision.imaging.image_times import ProbeImage
from nereid.vision.imaging.transform import Transform

# glibc keeps the memory of larger images for the next one.
LARGE_PIXELS = 16_000_000
# Source: RapidOCR, its default (text_score): below it, lines are mostly not text.
MIN_CONFIDENCE = 0.5

# Width and height of the picture of a health check.
PROBE_PX = 64

Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Networks:
    """The networks of a reader. Inputs are float32, BGR, -1..1.

    Attributes:
        detect: [1, 3, H, W] to probabilities of text float32[1, 1, H, W].
        direction: [N, 3, 48, 192] to probabilities float32[N, 2] of upright and upside down.
        recognise: [N, 3, 48, W] to the best class of each step int[N, T], and its probability float32[N, T].
    """

    detect: Network
    direction: Network
    recognise: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(slots=True)
class _Page:
    """One image while it is read.

    Attributes:
        check: raises the error of a request that nobody waits for any more.
        networks: that read it.
        times: of its stages.
        found: its lines.
        barcodes: that it has.
        texts: by the place of the line, text and confidence.
        error: why it is not read on.
    """

    check: Check
    networks: Networks
    times: StageTimes
    found: FoundLines = field(default_factory=FoundLines)
    barcodes: Sequence[FoundBarcode] = ()
    texts: dict[int, tuple[str, float]] = field(default_factory=dict)
    error: ServingError | None = None


class TextReader:
    """Reads batches of images, on one thread.

    Args:
        limits: on the images.
        min_confidence: lines below it are left out.
        max_lines: an image with more regions of text is rejected.
        max_read_s: an image whose stages take longer is rejected.
        sink: receives the signals of each image, for the comparison with a reference.
        reads_barcodes: whether barcodes are searched.

    `times` and `barcodes` have those of each image of the last batch.
    """

    def __init__(
        self,
        networks: Networks,
        characters: Characters,
        limits: Limits | None = None,
        min_confidence: float = MIN_CONFIDENCE,
        sink: Sink | None = None,
        max_lines: int = DEFAULT_MAX_LINES,
        max_read_s: float = DEFAULT_MAX_READ_S,
        reads_barcodes: bool = False,
    ) -> None:
        self._max_lines, self._max_read_s = max_lines, max_read_s
        self._networks, self._characters = networks, characters
        self._decode = UprightDecoder(limits or Limits())
        self._min_confidence, self._sink = min_confidence, sink
        self._reads_barcodes = reads_barcodes
        self.times: list[StageTimes] = []
        self.barcodes: list[Sequence[FoundBarcode]] = []

    def read(
        self,
        images: Sequence[bytes | ServingError],
        checks: Sequence[Check] | None = None,
        networks: Sequence[Networks] | None = None,
    ) -> list[list[RecognisedLine] | ServingError]:
        """Return the lines of each image in reading order, or its error; a bad image harms no other one.

        Args:
            images: encoded files; an error stays what it is.
            checks: one for each image, called between stages; a `ServingError` that it raises ends its image.
            networks: those of each image, instead of the reader's. Lines of several images that are read
                together go to the networks of the first one.
        """
        checks = checks or [_no_check] * len(images)
        networks = networks or [self._networks] * len(images)
        pages = [self._prepare(*each) for each in zip(images, checks, networks, strict=True)]
        self.times, self.barcodes = [page.times for page in pages], [page.barcodes for page in pages]
        self._recognise(pages)
        return [page.error or self._lines(page) for page in pages]

    def _prepare(self, encoded: bytes | ServingError, check: Check, networks: Networks) -> _Page:
        """Find the lines of one image: its pixels are in memory only here."""
        page = _Page(check, networks, StageTimes())
        if isinstance(encoded, ServingError):
            page.error = encoded
            return page
        page.times.begin(encoded)
        is_large = False
        try:
            with page.times.stage("decode"):
                image = self._decode(encoded, page.times)
            is_large = image.size_wh[0] * image.size_wh[1] > LARGE_PIXELS
            check()
            if isinstance(encoded, ProbeImage):
                page.found = _probe(image, networks)
            else:
                if self._sink:
                    _measure(image, self._sink)
                if self._reads_barcodes:
                    with page.times.stage("barcodes"):
                        page.barcodes = find_barcodes(image)
                page.found = find_lines(
                    image, networks.detect, networks.direction, page.times, self._max_lines
                )
        except Exception as error:  # a bad image must not fail the others
            page.error = from_exception(error)
        finally:
            if is_large:
                image = None  # type: ignore[assignment]
                return_memory()
        return page

    def _recognise(self, pages: Sequence[_Page]) -> None:
        places = [(page, line) for page in pages if not page.error for line in range(len(page.found.crops))]
        for group, width in batches([page.found.crops[line].shape[1] for page, line in places]):
            self._recognise_group([places[each] for each in group], width)

    def _recognise_group(self, group: Sequence[tuple[_Page, int]], width: int) -> None:
        pages = {id(page): page for page, _ in group if not page.error}.values()
        for page in pages:
            try:
                page.check()
                self._check_time(page)
            except Exception as error:
                page.error = from_exception(error)
        alive = [(page, line) for page, line in group if not page.error]
        if not alive:
            return
        begin_ns, failure = time.time_ns(), None
        try:
            recognise = alive[0][0].networks.recognise
            outputs = recognise(stacked([page.found.crops[line] for page, line in alive], width))
            for (page, line), text in zip(alive, self._characters.decode(*outputs), strict=True):
                page.texts[line] = text
        except Exception as error:  # the pages of other groups may be read
            failure = from_exception(error)
        end_ns = time.time_ns()
        for page in pages:
            page.error = page.error or failure
            page.times.add("recognise", begin_ns, end_ns)

    def _check_time(self, page: _Page) -> None:
        if sum(page.times.milliseconds().values()) > self._max_read_s * 1e3:
            count = len(page.found)
            raise InvalidImage(
                f"expected text that is read within {self._max_read_s:g} s, "
                f"got {min(len(page.texts), count)} of {count} lines in this time; fix: send parts of it"
            )

    def _lines(self, page: _Page) -> list[RecognisedLine]:
        places = [_better(page, line) for line in range(len(page.found))]
        boxes = page.found.boxes[places]
        lines = [RecognisedLine(*page.texts[places[each]], boxes[each]) for each in reading_order(boxes)]
        return [
            line
            for line in lines
            if line.text.strip()
            and line.confidence >= self._min_confidence
            and not any(barcode.has(line.box) for barcode in page.barcodes)
        ]


def _better(page: _Page, line: int) -> int:
    other = page.found.others.get(line, line)
    return max(line, other, key=lambda each: (bool(page.texts[each][0].strip()), page.texts[each][1]))


def _probe(image: UprightImage, networks: Networks) -> FoundLines:
    """Run every network on a small picture: a health check must be cheap."""
    small = cv2.resize(image.pixels, (PROBE_PX, PROBE_PX), interpolation=cv2.INTER_AREA)
    networks.detect(normalised(small))
    line = cv2.resize(small, (PROBE_PX, LINE_HEIGHT_PX), interpolation=cv2.INTER_LINEAR)
    upside_down(networks.direction, [line])
    return FoundLines(np.zeros((1, 4, 2), np.float32), [line])


def _no_check() -> None:
    return None


def _measure(image: UprightImage, sink: Sink) -> None:
    """Send the signals of an image; a failure here never harms its request."""
    height, width = image.pixels.shape[:2]
    with contextlib.suppress(Exception):
        meter = ImageMeter(Transform(height, width, "UINT8", "NHWC", "exact"), sink)
        sink(meter.pixel_signals(image.pixels) | size_signals(image.size_wh))
