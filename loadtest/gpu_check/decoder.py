"""Decoding with nvImageCodec, then the kernel: JPEGs, other files, damaged files, and rates."""

import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from PIL import Image

from loadtest.gpu_check import chain
from loadtest.gpu_check.sections import Context, Findings
from nereid.assets import CHELSEA, COFFEE
from nereid.serving_errors import ServingError, from_exception
from nereid.tune import photos

BATCH_SIZES = (1, 8, 32)
TIMED_S = 1.0
# A photo of a phone.
LARGE_WH = (4000, 3000)


class File(NamedTuple):
    """A file; `fallbacks` is 1 if the host decodes it, and 0 if the GPU does or the file is invalid."""

    encoded: bytes
    fallbacks: int
    is_damaged: bool = False


def files() -> dict[str, File]:
    """Return one file of each kind."""
    jpeg = COFFEE.read_bytes()
    return {
        "JPEG 4:2:0": File(jpeg, 0),
        "JPEG 4:4:4": File(encode(subsampling=0), 0),
        "JPEG, grey": File(encode(mode="L"), 0),
        "JPEG, progressive": File(encode(progressive=True), 0),
        "JPEG, turned": File(encode(orientation=6), 0),
        "JPEG, CMYK": File(encode(mode="CMYK"), 1),
        "PNG": File(encode("PNG"), 1),
        "WebP": File(encode("WEBP"), 1),
        "JPEG, cut off": File(jpeg[:-5000], 1, is_damaged=True),
        "JPEG, header only": File(jpeg[:2000], 1, is_damaged=True),
        "not an image": File(b"not an image", 0, is_damaged=True),
        "empty": File(b"", 0, is_damaged=True),
    }


def encode(image_format: str = "JPEG", mode: str = "RGB", orientation: int = 1, **options: object) -> bytes:
    """Encode a sample photo again."""
    target, exif = io.BytesIO(), Image.Exif()
    exif[0x112] = orientation
    Image.open(CHELSEA).convert(mode).save(target, image_format, exif=exif, **options)
    return target.getvalue()


def measure(context: Context) -> Iterator[Findings]:
    """Yield the outcome of each file, the fallbacks of photos, and rates."""
    preprocessor = chain.build_preprocessor(max(BATCH_SIZES))
    found = {name: _one(preprocessor, file) for name, file in files().items()}
    yield {"files": found, **verdicts(found)}
    yield {"alone": _fails_alone(preprocessor)}
    before = preprocessor.fallbacks
    rows = []
    for size_wh in (*photos.SIZES_WH.values(), LARGE_WH):
        for batch_size in BATCH_SIZES:
            images = [photos.jpeg(size_wh)] * batch_size
            steps = chain.steps_ms(preprocessor, images, TIMED_S / 3)
            rate = round(batch_size / steps["decode_ms"] * 1e3)
            rows.append(
                {
                    "photo": "x".join(map(str, size_wh)),
                    "batch_size": batch_size,
                    **steps,
                    "decode_per_s": rate,
                }
            )
            yield {"times": rows, "fallbacks_of_photos": preprocessor.fallbacks - before}


def rehearse(context: Context) -> Iterator[Findings]:
    """Yield the CPU path's outcome of each file, with which the GPU's is compared."""
    yield {"files": {name: host_error(file.encoded) or "decoded" for name, file in files().items()}}


def host_error(encoded: bytes) -> str:
    """Return the CPU path's error for a file, or an empty text."""
    try:
        chain.on_host(chain.transform(), encoded)
    except Exception as error:  # any error is an outcome
        return str(from_exception(error))
    return ""


def verdicts(found: dict[str, dict[str, object]]) -> dict[str, object]:
    """Count the files whose fallbacks or errors are not the expected ones."""
    expected = files()
    good = [each for name, each in found.items() if not expected[name].is_damaged]
    return {
        "unexpected_fallbacks": [
            name for name, each in found.items() if each["fallbacks"] != expected[name].fallbacks
        ],
        "unexpected_errors": [name for name, each in found.items() if each["error"] != each["error_on_host"]],
        "worst_mean": max(each["mean"] for each in good if isinstance(each["mean"], float)),
    }


def _one(preprocessor: Any, file: File) -> dict[str, object]:
    before = preprocessor.fallbacks
    (outcome,) = preprocessor.prepare([file.encoded])
    error = host_error(file.encoded)
    wanted = chain.transform()
    row = preprocessor.tensor[0].get()
    apart = {} if outcome or error else chain.difference(wanted, row, chain.on_host(wanted, file.encoded))
    return {
        "fallbacks": preprocessor.fallbacks - before,
        "error": str(outcome) if isinstance(outcome, ServingError) else "",
        "error_on_host": error,
        "mean": None,
        **apart,
    }


def _fails_alone(preprocessor: Any) -> dict[str, object]:
    """Prepare good and damaged files together; returns whether the good rows are as alone."""
    good = CHELSEA.read_bytes()
    preprocessor.prepare([good])
    alone = preprocessor.tensor[0].get()
    damaged: Sequence[bytes] = [file.encoded for file in files().values() if file.is_damaged]
    outcomes = preprocessor.prepare([*damaged, good])
    row = preprocessor.tensor[len(damaged)].get()
    return {
        "damaged": len(damaged),
        "failed": sum(outcome is not None for outcome in outcomes),
        "good_row_unchanged": bool((row == alone).all()) and outcomes[-1] is None,
    }
