"""Reading text in encoded images, with networks that may run anywhere."""

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

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
from nereid.vision.imaging.decode import LARGE_PIXELS, ImageLimits
from nereid.vision.imaging.image_signals import ImageMeter, Sink, size_signals
from nereid.vision.imaging.image_times import ProbeImage
from nereid.vision.imaging.transform import Transform

# Source: RapidOCR's default (text_score); lines below it are mostly not text.
MIN_CONFIDENCE = 0.5

# A line below the first is also read upside down; a text from the second on replaces it. Source: 0.64 to 0.89
# for lines read upside down, 0.96 to 1 for the same lines upright, and 8 % of the lines of damaged waybills
# below 0.9; 60 single lines and 60 waybills, measured 2026-11-30.
DOUBTFUL_CONFIDENCE, CLEAR_CONFIDENCE = 0.9, 0.95

# Width and height of a health check's image.
PROBE_PX = 64

Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Networks:
    """The networks of a reader. Inputs are float32, BGR, -1..1.

    Attributes:
        detect: [1, 3, H, W] to probabilities of text float32[1, 1, H, W].
        direction: [N, 3, 48, 192] to probabilities float32[N, 2] of upright and upside down.
        recognise: [N, 3, 48, W] to the best class of each step int[N, T], and its probability float32[N, T],
            perhaps followed by both for the next best class.
    """

    detect: Network
    direction: Network
    recognise: Callable[[np.ndarray], Sequence[np.ndarray]]


@dataclass(slots=True)
class ReadFile:
    """One file, while it is being read and afterwards.

    Attributes:
        check: raises if the request was cancelled or has expired.
        networks: the networks that read it.
        times: times of its stages.
        is_probe: whether it comes from a health check.
        images: its pages, decoded one by one.
        sizes_wh: sizes of the pages so far, in pixels.
        lines, barcodes: lines and barcodes of these pages, each page's lines in reading order.
        begun_ms: time of all stages before the current page.
        error: why reading stopped; its lines are then ignored.
    """

    check: Check
    networks: Networks
    times: StageTimes
    is_probe: bool
    images: Generator[UprightImage, None, None]
    sizes_wh: list[tuple[int, int]] = field(default_factory=list)
    lines: list[RecognisedLine] = field(default_factory=list)
    barcodes: list[FoundBarcode] = field(default_factory=list)
    begun_ms: float = 0.0
    error: ServingError | None = None

    @property
    def spent_ms(self) -> float:
        """Total time of all stages so far, in milliseconds."""
        return sum(self.times.milliseconds().values())

    def decode_next(self) -> UprightImage | None:
        """Return the next page; None at the end."""
        begin_ns, is_end = time.time_ns(), False
        try:
            image = next(self.images, None)
            is_end = image is None
            return image
        finally:
            if not is_end:
                self.times.add("decode", begin_ns, time.time_ns())

    def fail(self, error: Exception, page_number: int) -> None:
        """Stop reading further pages because of an error on this one."""
        self.images.close()
        if page_number > 1 and isinstance(error, InvalidImage):
            error = InvalidImage(f"page {page_number}: {error.args[0]}")
        self.error = from_exception(error)


@dataclass(slots=True)
class _Page:
    """One page while it is being read.

    Attributes:
        file: the file that contains it.
        found: its lines.
        barcodes: its barcodes.
        texts: text, confidence and other characters by line index.
        doubtful: indices of lines that are read upside down as well, because their text is doubtful.
    """

    file: ReadFile
    found: FoundLines
    barcodes: Sequence[FoundBarcode]
    texts: dict[int, tuple[str, float, str]] = field(default_factory=dict)
    doubtful: Sequence[int] = ()


class TextReader:
    """Reads batches of images on one thread.

    Args:
        limits: limits on the images.
        min_confidence: lines below it are dropped.
        max_lines: an image with more regions of text is rejected.
        max_read_s: an image whose stages take longer is rejected.
        sink: receives each image's signals, for comparison with a reference.
        reads_barcodes: whether to search for barcodes.
        max_pages: a file with more pages is rejected; 0 reads only images, and only the first page of each.
    """

    def __init__(
        self,
        networks: Networks,
        characters: Characters,
        limits: ImageLimits | None = None,
        min_confidence: float = MIN_CONFIDENCE,
        sink: Sink | None = None,
        max_lines: int = DEFAULT_MAX_LINES,
        max_read_s: float = DEFAULT_MAX_READ_S,
        reads_barcodes: bool = False,
        max_pages: int = 0,
    ) -> None:
        self._max_lines, self._max_read_s = max_lines, max_read_s
        self._networks, self._characters = networks, characters
        self._decode = UprightDecoder(limits or ImageLimits(), max_pages)
        self._min_confidence, self._sink = min_confidence, sink
        self._reads_barcodes = reads_barcodes

    def read(
        self,
        images: Sequence[bytes | ServingError],
        checks: Sequence[Check] | None = None,
        networks: Sequence[Networks] | None = None,
    ) -> list[ReadFile]:
        """Return each file with its lines, or its error; a bad image does not affect the others.

        Args:
            images: encoded files; an error is passed through unchanged.
            checks: one per image, called between stages; a `ServingError` raised by it ends that image.
            networks: networks for each image, instead of the reader's. Lines of several images that are read
                together use the first image's networks.
        """
        checks = checks or [lambda: None] * len(images)
        networks = networks or [self._networks] * len(images)
        files = [self._open(*job) for job in zip(images, checks, networks, strict=True)]
        self._recognise([page for file in files if (page := self._next_page(file))])
        for file in files:  # the lines of only one page are in memory at a time
            while page := self._next_page(file):
                self._recognise([page])
        return files

    def _open(self, encoded: bytes | ServingError, check: Check, networks: Networks) -> ReadFile:
        times = StageTimes()
        if isinstance(encoded, ServingError):
            return ReadFile(check, networks, times, False, (_ for _ in ()), error=encoded)
        times.attributes["bytes"] = len(encoded)
        is_probe = isinstance(encoded, ProbeImage)
        return ReadFile(check, networks, times, is_probe, self._decode.pages(encoded, times))

    def _next_page(self, file: ReadFile) -> _Page | None:
        """Find the lines of the next page, whose pixels are in memory only here; None at the end."""
        if file.error:
            return None
        is_large, number = False, len(file.sizes_wh) + 1
        file.begun_ms = file.spent_ms
        try:
            image = file.decode_next()
            if image is None:
                return None
            file.sizes_wh.append(image.size_wh)
            is_large = image.size_wh[0] * image.size_wh[1] > LARGE_PIXELS
            file.check()
            if file.is_probe:
                return _Page(file, _probe(image, file.networks), ())
            if self._sink and number == 1:
                _measure(image, self._sink)
            barcodes: Sequence[FoundBarcode] = ()
            if self._reads_barcodes:
                with file.times.stage("barcodes"):
                    barcodes = find_barcodes(image)
            detect, direction = file.networks.detect, file.networks.direction
            lines = find_lines(image, detect, direction, file.times, self._max_lines)
            if number > 1 and not len(lines):  # other pages are checked before their lines are recognised
                self._check_time(file)
            return _Page(file, lines, barcodes)
        except Exception as error:  # a bad image must not fail the others
            file.fail(error, number)
            return None
        finally:
            if is_large:
                image = None
                return_memory()

    def _recognise(self, pages: Sequence[_Page]) -> None:
        """Recognise the lines of several pages together, and add them to their files."""
        self._recognise_new(pages)
        for page in pages:
            page.doubtful = _doubtful(page)
            page.found = page.found.with_others(page.doubtful)
        self._recognise_new(pages)
        for page in pages:
            if not page.file.error:
                number = len(page.file.sizes_wh)
                page.file.lines += [replace(line, page=number) for line in self._lines(page)]
                page.file.barcodes += [replace(barcode, page=number) for barcode in page.barcodes]

    def _recognise_new(self, pages: Sequence[_Page]) -> None:
        """Recognise the lines, also rotated ones, that have no text yet."""
        lines = [(page, line) for page in pages for line in range(len(page.texts), len(page.found.crops))]
        for group, width in batches([page.found.crops[line].shape[1] for page, line in lines]):
            self._recognise_group([lines[index] for index in group], width)

    def _recognise_group(self, group: Sequence[tuple[_Page, int]], width: int) -> None:
        pages = {id(page): page for page, _ in group if not page.file.error}.values()
        for page in pages:
            try:
                page.file.check()
                self._check_time(page.file, len(page.found), len(page.texts))
            except Exception as error:
                page.file.fail(error, len(page.file.sizes_wh))
        alive = [(page, line) for page, line in group if not page.file.error]
        if not alive:
            return
        begin_ns, failure = time.time_ns(), None
        try:
            recognise = alive[0][0].file.networks.recognise
            outputs = recognise(stacked([page.found.crops[line] for page, line in alive], width))
            for (page, line), text in zip(alive, self._characters.decode(*outputs), strict=True):
                page.texts[line] = text
        except Exception as error:  # pages in other groups can still be read
            failure = error
        end_ns = time.time_ns()
        for page in pages:
            if failure and not page.file.error:
                page.file.fail(failure, len(page.file.sizes_wh))
            page.file.times.add("recognise", begin_ns, end_ns)

    def _check_time(self, file: ReadFile, found: int = 0, done: int = 0) -> None:
        """Reject a file whose current page has taken too long."""
        if file.spent_ms - file.begun_ms > self._max_read_s * 1e3:
            raise InvalidImage(
                f"expected text that is read within {self._max_read_s:g} s, "
                f"got {min(done, found)} of {found} lines in this time; fix: send parts of it"
            )

    def _lines(self, page: _Page) -> list[RecognisedLine]:
        kept = [_better(page, line) for line in range(len(page.found))]
        boxes = page.found.boxes[kept]
        lines = []
        for index in reading_order(boxes):
            text, confidence, others = page.texts[kept[index]]
            lines.append(RecognisedLine(text, confidence, boxes[index], others=others))
        return [
            line
            for line in lines
            if line.text.strip()
            and line.confidence >= self._min_confidence
            and not any(barcode.has(line.box) for barcode in page.barcodes)
        ]


def _doubtful(page: _Page) -> list[int]:
    """Return the lines that may be upside down although the direction network did not see it."""
    if page.file.error or page.file.is_probe:
        return []
    return [
        line
        for line in range(len(page.found))
        if line not in page.found.others and 0 < page.texts[line][1] < DOUBTFUL_CONFIDENCE
    ]


def _better(page: _Page, line: int) -> int:
    other = page.found.others.get(line, line)
    if line in page.doubtful and page.texts[other][1] < CLEAR_CONFIDENCE:
        return line
    return max(line, other, key=lambda index: (bool(page.texts[index][0].strip()), page.texts[index][1]))


def _probe(image: UprightImage, networks: Networks) -> FoundLines:
    """Run every network on a small image, because a health check must be cheap."""
    small = cv2.resize(image.pixels, (PROBE_PX, PROBE_PX), interpolation=cv2.INTER_AREA)
    networks.detect(normalised(small))
    line = cv2.resize(small, (PROBE_PX, LINE_HEIGHT_PX), interpolation=cv2.INTER_LINEAR)
    upside_down(networks.direction, [line])
    return FoundLines(np.zeros((1, 4, 2), np.float32), [line])


def _measure(image: UprightImage, sink: Sink) -> None:
    """Send an image's signals; a failure here never affects its request."""
    height, width = image.pixels.shape[:2]
    with contextlib.suppress(Exception):
        meter = ImageMeter(Transform(height, width, "UINT8", "NHWC", "exact"), sink)
        sink(meter.pixel_signals(image.pixels) | size_signals(image.size_wh))
