"""The barcodes on a page, read by ZXing (zxing-cpp) or, if it cannot read them, by `blurred_bars`."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import zxingcpp

from nereid.tasks.read.blurred_bars import read_blurred
from nereid.tasks.read.line_images import UprightImage

# Bars are searched for on at most this many pixels per side: an A4 page at 210 dpi.
MAX_SIDE_PX = 2500
# A document page has fewer; any more are left out.
MAX_BARCODES = 64
# Codabar is excluded: without a check digit, it is found in tables. ZXing reads MaxiCode only on images that
# show nothing else.
_FORMATS = zxingcpp.barcode_formats_from_str(
    "Code128,Code39,Code93,ITF,EAN13,EAN8,UPCA,UPCE,DataBar,PDF417,DataMatrix,QRCode,Aztec"
)
# Names of symbols that carry GS1 application identifiers, by AIM symbology identifier.
# Source: GS1 General Specifications 5.1.3.
_GS1 = {"]C1": "GS1-128", "]d2": "GS1 DataMatrix", "]Q3": "GS1 QR Code"}


@dataclass(frozen=True, slots=True)
class FoundBarcode:
    """One barcode.

    Attributes:
        text: the content. GS1 application identifiers are in parentheses, as below the bars: `(00)3401…`.
        symbology: name, such as `Code 128`, `QR Code` or `GS1-128`.
        box: corners float32[4, 2] in pixels of the upright original, clockwise from the symbol's top left.
        page: page number, from 1.
    """

    text: str
    symbology: str
    box: np.ndarray
    page: int = 1

    def has(self, box: np.ndarray) -> bool:
        """Return whether the centre of a box, corners float32[4, 2], is inside the symbol, so is not text."""
        x, y = box.mean(axis=0)
        return cv2.pointPolygonTest(self.box, (float(x), float(y)), measureDist=False) >= 0


def find_barcodes(image: UprightImage) -> Sequence[FoundBarcode]:
    """Return a page's barcodes in any orientation, from top to bottom."""
    grey = cv2.cvtColor(image.pixels, cv2.COLOR_RGB2GRAY)
    room = MAX_SIDE_PX / max(grey.shape)
    scale = 2.0 if room >= 2 else min(room, 1.0)
    if scale != 1:
        height, width = (max(round(side * scale), 1) for side in grey.shape)
        interpolation = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
        grey = cv2.resize(grey, (width, height), interpolation=interpolation)
    codes = [(code, _corners(code.position)) for code in zxingcpp.read_barcodes(grey, formats=_FORMATS)]
    codes += read_blurred(grey, [corners for _, corners in codes])
    barcodes = [
        FoundBarcode(
            code.text,
            _GS1.get(code.symbology_identifier, str(code.format)),
            corners * image.scale_xy / np.float32(scale),
        )
        for code, corners in codes
    ]
    return sorted(barcodes, key=lambda barcode: float(barcode.box[:, 1].mean()))[:MAX_BARCODES]


def _corners(position: zxingcpp.Position) -> np.ndarray:
    corners = position.top_left, position.top_right, position.bottom_right, position.bottom_left
    return np.array([(corner.x, corner.y) for corner in corners], np.float32)
