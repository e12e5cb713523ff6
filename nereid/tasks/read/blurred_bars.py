"""Code 128 too blurred or worn for ZXing, decoded by comparison with what each symbol would look like.

OpenCV finds the bars, whose rows are averaged to one profile. For each symbol count, position and blur, every
part of the profile is compared with all symbols, blurred alike. The smallest sum of squares with a correct
check symbol wins. It is accepted if it wins by a wide margin, of which the check symbol may cost only a part.

Source: Gallo and Manduchi, Reading 1D barcodes with mobile phones using deformable templates, 2011.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import cv2
import numpy as np
import zxingcpp

# Bar and space widths of all symbols, and of the stop. Source: ISO/IEC 15417, table 1.
_WIDTHS = (
    "212222222122222221121223121322131222122213122312132212221213221312231212112232122132122231113222"
    "123122123221223211221132221231213212223112312131311222321122321221312212322112322211212123212321"
    "232121111323131123131321112313132113132311211313231113231311112133112331132131113123113321133121"
    "313121211331231131213113213311213131311123311321331121312113312311332111314111221411431111111224"
    "111422121124121421141122141221112214112412122114122411142112142211241211221114413111241112134111"
    "111242121142121241114212124112124211411212421112421211212141214121412121111143111341131141114113"
    "114311411113411311113141114131311141411131211412211214211232"
)
_STOP = "2331112"
# Number of data symbols, and the first of the three start symbols; modules per symbol and in the stop.
_DATA = 103
_START = 103
_SYMBOL = 11
_STOP_MODULES = 13
# Samples per module, and neighbouring modules that blur may mix in.
_SAMPLES, _PAD = 5, 3
# Blur widths in modules: standard deviations for defocus, lengths for motion.
_SIGMAS, _LENGTHS = (0.3, 0.5, 0.7, 0.95), (1.5, 2.0, 2.6, 3.2)
# Symbols in one code without start and stop: data and the check symbol. Parcels use 8 to 24.
_COUNTS, MAX_COUNTS = range(6, 27), 2
MAX_REGIONS, MIN_WIDTH_PX = 4, 60
# Longer sides of the images searched for bars, until some are found: small ones show blurred bars.
SIDES_PX = (400, 900)
# Ink fainter than this fraction of paper is ignored.
MIN_SLOPE = 0.02
# Maximum mean square residual, in levels between paper (0) and ink (1), for the first fit and the final one.
MAX_FIRST = 0.065
MAX_REST = 0.04
# How much worse the runner-up must be, as a fraction of it; what the check symbol may cost, as part of that.
MIN_AHEAD = 0.5
MAX_CHECK = 0.15
# With more than this at a medium blur, other blurs do not fit, either.
MAX_MIDDLE = 0.13
# If the runner-up is this much worse, the check symbol may cost as much as that.
FAR_AHEAD = 1.5
_ROWS = 24
_OVERSAMPLED = 2.0
_MARGIN = 1.3
_SHEARS = range(-32, 33, 4)


@dataclass(frozen=True, slots=True)
class _Templates:
    """The symbols under one blur: data float32[103, N], and [3, M] for each start symbol with the stop.

    `ends` are relative to their `middles` [3, 1]; `data_squares` and `ends_squares` are sums over N and M.
    """

    data: np.ndarray
    data_squares: np.ndarray
    ends: np.ndarray
    ends_squares: np.ndarray
    middles: np.ndarray


@dataclass(frozen=True, slots=True)
class _Fit:
    """How well a position fits: `costs` [symbols, 103] are mean squares, `rest` the smallest mean of them."""

    rest: float
    start: int
    costs: np.ndarray


@dataclass(frozen=True, slots=True)
class _Guess:
    """A possible code: its symbol count, its ends in the profile, its narrowing and its blur."""

    count: int
    ends: tuple[float, float]
    warp: float
    blur: int


def read_blurred(grey: np.ndarray, known: list[np.ndarray]) -> Iterator[tuple[zxingcpp.Barcode, np.ndarray]]:
    """Yield the content of blurred bars and their corners float32[4, 2]; known ones are skipped."""
    regions = _regions(grey)
    for region in regions[:MAX_REGIONS]:
        middles = [tuple(map(float, corners.mean(axis=0))) for corners in known]
        if any(cv2.pointPolygonTest(region, middle, measureDist=False) >= 0 for middle in middles):
            continue
        if barcode := _read_region(grey, region):
            yield barcode


def _regions(grey: np.ndarray) -> list[np.ndarray]:
    """Return the corners float32[4, 2] of regions that look like bars, largest first."""
    for side in SIDES_PX:
        scale = min(1.0, side / max(grey.shape))
        size = [max(1, round(length * scale)) for length in grey.shape[::-1]]
        _, boxes = cv2.barcode.BarcodeDetector().detect(cv2.resize(grey, size, interpolation=cv2.INTER_AREA))
        if boxes is not None:
            return sorted(boxes / np.float32(scale), key=cv2.contourArea, reverse=True)
    return []


def _read_region(grey: np.ndarray, region: np.ndarray) -> tuple[zxingcpp.Barcode, np.ndarray] | None:
    center = region.mean(axis=0)
    sides = sorted((region[1] - region[0], region[2] - region[1]), key=lambda side: -np.linalg.norm(side))
    width, height = (float(np.linalg.norm(side)) for side in sides)
    if width < MIN_WIDTH_PX:
        return None
    along = sides[0] / width * (1 if sides[0][0] >= 0 else -1)
    across = np.array([-along[1], along[0]], np.float32)
    profile = _profile(grey, center, along * width * _MARGIN, across * height * 0.7)
    dark = np.flatnonzero(profile > max(0.08, 0.35 * np.percentile(profile, 95)))
    if len(dark) < _SYMBOL:
        return None
    parts = np.split(dark, np.flatnonzero(np.diff(dark) > 0.06 * len(profile)) + 1)
    longest = max(parts, key=lambda part: int(part[-1] - part[0]))
    first, last = int(longest[0]), int(longest[-1]) + 1
    for is_reversed in (False, True):
        levels = profile[::-1] if is_reversed else profile
        ends = (len(profile) - last, len(profile) - first) if is_reversed else (first, last)
        if symbols := _decode(levels, ends):
            shares = np.array([first, last]) / len(profile) - 0.5
            left, right = (center + along * width * _MARGIN * share for share in shares)
            half = across * height / 2
            corners = np.array([left - half, right - half, right + half, left + half], np.float32)
            barcode = _as_barcode(symbols)
            return (barcode, np.roll(corners, 2, axis=0) if is_reversed else corners) if barcode else None
    return None


def _profile(grey: np.ndarray, center: np.ndarray, along: np.ndarray, across: np.ndarray) -> np.ndarray:
    """Return the levels across bars, 0 for paper and higher for ink, averaged along each bar."""
    size = int(np.linalg.norm(along) * _OVERSAMPLED)
    source = np.array(
        [center - along / 2 - across / 2, center + along / 2 - across / 2, center - along / 2 + across / 2]
    )
    matrix = cv2.getAffineTransform(
        source.astype(np.float32), np.array([[0, 0], [size, 0], [0, _ROWS]], np.float32)
    )
    means = []
    for shear in _SHEARS:
        sheared = matrix.copy()
        sheared[0] += shear / _ROWS * (matrix[1] - [0, 0, _ROWS / 2])
        rows = cv2.warpAffine(grey, sheared, (size, _ROWS), borderMode=cv2.BORDER_REPLICATE)
        means.append(rows.mean(axis=0, dtype=np.float32))
    mean = max(means, key=lambda profile: float(np.square(np.diff(profile)).sum()))
    reach = max(3, size // 9) | 1
    paper = cv2.GaussianBlur(cv2.dilate(mean[None], np.ones((1, reach))), (0, 0), reach / 3)[0]
    levels: np.ndarray = 1 - mean / np.maximum(paper, 1)
    return levels


def _decode(levels: np.ndarray, ends: tuple[int, int]) -> list[int] | None:
    """Return the symbols between two ends, with start and check symbol; None if they are ambiguous."""
    rests: dict[_Guess, float] = {}
    for guess in (_Guess(count, ends, 0.0, 3) for count in _COUNTS):
        part = _part(levels, guess)
        rests[guess] = _fit(part, guess).rest
        if rests[guess] <= MAX_MIDDLE:
            for blur in (1, 6):
                other = replace(guess, blur=blur)
                rests[other] = _fit(part, other).rest
    order = sorted((guess for guess in rests if rests[guess] <= MAX_FIRST), key=rests.__getitem__)
    first = {guess.count: guess for guess in reversed(order)}  # the best guess for each count
    likely = list(dict.fromkeys(guess.count for guess in order))[:MAX_COUNTS]
    fits = [_refined(levels, first[count]) for count in likely]
    return _symbols(min(fits, key=lambda fit: fit.rest)) if fits else None


def _refined(levels: np.ndarray, guess: _Guess) -> _Fit:
    """Return the best fit near a guess."""
    module = (guess.ends[1] - guess.ends[0]) / _modules(guess.count)
    best, fit = guess, _fit(_part(levels, guess), guess)
    blurs = range(len(_SIGMAS) + len(_LENGTHS))
    for step, warp in ((0.5, 0.0), (0.5, 0.03), (0.25, 0.015), (0.12, 0.008)):
        tried = [
            _Guess(
                guess.count,
                (best.ends[0] + left * step * module, best.ends[1] + right * step * module),
                best.warp + bend * warp,
                best.blur,
            )
            for left, right in product((-1, 0, 1), repeat=2)
            for bend in ((-1, 0, 1) if warp else (0,))
        ]
        for trial in tried:
            part = _part(levels, trial)
            for blur in (trial.blur,) if warp else blurs:
                rival = _fit(part, blurred := replace(trial, blur=blur))
                if rival.rest < fit.rest:
                    best, fit = blurred, rival
    return fit


def _modules(count: int) -> int:
    return _SYMBOL * (count + 1) + _STOP_MODULES


def _part(levels: np.ndarray, guess: _Guess) -> np.ndarray:
    """Return the part of the profile between two ends, with `_SAMPLES` per module."""
    size = _modules(guess.count) * _SAMPLES
    positions = (np.arange(size, dtype=np.float32) + 0.5) / size
    positions += guess.warp * positions * (1 - positions)
    first, last = guess.ends
    part = np.interp(first + positions * (last - first) - 0.5, np.arange(len(levels)), levels)
    return part.astype(np.float32)


def _fit(read: np.ndarray, guess: _Guess) -> _Fit:
    """Compare part of the profile with all symbols."""
    templates = _templates()[guess.blur]
    head, tail = _SYMBOL * _SAMPLES, _STOP_MODULES * _SAMPLES
    ends = np.concatenate([read[:head], read[-tail:]])
    middle = ends.sum() / len(ends)
    above, shape = ends - middle, templates.ends
    slopes = np.maximum(shape @ above / templates.ends_squares, MIN_SLOPE)
    rests = np.square(above - slopes[:, None] * shape).sum(axis=1) / len(ends) / slopes**2
    start = int(rests.argmin())
    rest, gain, base = float(rests[start]), slopes[start], middle - slopes[start] * templates.middles[start]
    symbols = (read[head:-tail].reshape(guess.count, head) - base) / gain
    squares = np.square(symbols).sum(axis=1)[:, None] + templates.data_squares
    costs = (squares - 2 * symbols @ templates.data.T) / head
    return _Fit((float(costs.min(axis=1).sum()) + 2 * rest) / (guess.count + 2), start, costs)


def _symbols(fit: _Fit) -> list[int] | None:
    least = float(fit.costs.min(axis=1).sum())
    total, symbols = _checked(fit.costs, fit.start)
    rest = total / len(symbols)
    if rest > MAX_REST:
        return None
    ahead = np.inf
    for position, symbol in enumerate(symbols):
        others = fit.costs.copy()
        others[position, symbol] = np.inf
        ahead = min(ahead, _checked(others, fit.start)[0] - total)
    max_check = ahead if ahead >= FAR_AHEAD * rest else MAX_CHECK * ahead
    if ahead < MIN_AHEAD * rest or total - least > max_check:
        return None
    return [_START + fit.start, *symbols]


def _checked(costs: np.ndarray, start: int) -> tuple[float, list[int]]:
    """Return the cheapest symbols whose last one is the correct check symbol, preceded by their cost."""
    residues = np.arange(_DATA)
    least = np.full(_DATA, np.inf)
    least[(_START + start) % _DATA] = 0.0
    steps = []
    for weight, cost in enumerate(costs[:-1], 1):
        before = (residues[:, None] - weight * residues) % _DATA
        sums = least[before] + cost
        chosen = sums.argmin(axis=1)
        steps.append((before[residues, chosen], chosen))
        least = sums[residues, chosen]
    sums = least + costs[-1]
    residue = int(sums.argmin())
    symbols = [residue]
    total = float(sums[residue])
    for before, chosen in reversed(steps):
        symbols.append(int(chosen[residue]))
        residue = int(before[residue])
    return total, symbols[::-1]


def _as_barcode(symbols: list[int]) -> zxingcpp.Barcode | None:
    """Decode symbols by having ZXing read them without blur."""
    modules = np.concatenate([*(_patterns()[symbol] for symbol in symbols), _pattern(_STOP)])
    row = np.pad(np.where(modules > 0, 0, 255).astype(np.uint8), 12, constant_values=255).repeat(3)
    barcodes = zxingcpp.read_barcodes(
        np.tile(row, (40, 1)), formats=zxingcpp.barcode_formats_from_str("Code128")
    )
    return barcodes[0] if barcodes else None


def _pattern(widths: str) -> np.ndarray:
    """Return the modules of a symbol, 1 for ink."""
    return np.concatenate([np.full(int(width), 1.0 - index % 2) for index, width in enumerate(widths)])


@cache
def _patterns() -> list[np.ndarray]:
    return [_pattern(_WIDTHS[at : at + 6]) for at in range(0, len(_WIDTHS), 6)]


@cache
def _templates() -> list[_Templates]:
    at = np.arange(-_PAD * _SAMPLES, _PAD * _SAMPLES + 1) / _SAMPLES
    blurs = [np.exp(-((at / sigma) ** 2) / 2) for sigma in _SIGMAS]
    blurs += [np.clip((length / 2 - np.abs(at)) * _SAMPLES + 0.5, 0, 1) for length in _LENGTHS]

    def blurred(before: list[float], modules: np.ndarray, after: list[float], blur: np.ndarray) -> np.ndarray:
        levels = np.repeat(np.concatenate([before, modules, after]), _SAMPLES)
        mixed: np.ndarray = np.convolve(levels, blur / blur.sum(), "same")
        return mixed[_PAD * _SAMPLES : -_PAD * _SAMPLES].astype(np.float32)

    # A symbol begins with ink and ends with paper; anything farther away is unknown.
    paper, last, first = [0.0] * _PAD, [0.4, 0.3, 0.0], [1.0, 0.5, 0.5]
    templates = []
    for blur in blurs:
        data = np.array([blurred(last, modules, first, blur) for modules in _patterns()[:_DATA]])
        stop = blurred(last, _pattern(_STOP), paper, blur)
        ends = np.array(
            [np.concatenate([blurred(paper, modules, first, blur), stop]) for modules in _patterns()[_START:]]
        )
        middles = ends.sum(axis=1, keepdims=True) / ends.shape[1]
        shape = ends - middles
        squares = [np.square(rows).sum(axis=1) for rows in (data, shape)]
        templates.append(_Templates(data, squares[0], shape, squares[1], middles))
    return templates
