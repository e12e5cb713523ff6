"""The photos for all measurements, made from the sample: 640×427, and 1920×1080 of about 400 kB."""

import io
from collections.abc import Sequence

from PIL import Image

from nereid.base.assets import COFFEE
from nereid.base.task_registry import task_of

SIZES_WH = {"640x427": (640, 427), "1920x1080": (1920, 1080)}
JPEG_QUALITY = 94


def sample(outputs: Sequence[str]) -> bytes:
    """Return the sample of the task of a model with these outputs, such as a parcel label, else a photo."""
    task = task_of(outputs)
    return task.sample.read_bytes() if task and task.sample else jpeg(SIZES_WH["640x427"])


def jpeg(size_wh: tuple[int, int]) -> bytes:
    """Return the sample photo as a JPEG of a size; its sides are cropped to the aspect ratio first."""
    with Image.open(COFFEE) as photo:
        width, height = photo.size
        aspect = size_wh[0] / size_wh[1]
        crop_w, crop_h = min(width, height * aspect), min(height, width / aspect)
        left, top = (width - crop_w) / 2, (height - crop_h) / 2
        box = (left, top, left + crop_w, top + crop_h)
        resized = photo.resize(size_wh, Image.Resampling.LANCZOS, box)
    encoded = io.BytesIO()
    resized.save(encoded, "JPEG", quality=JPEG_QUALITY)
    return encoded.getvalue()
