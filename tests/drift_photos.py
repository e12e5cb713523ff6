"""Photos for the drift monitor: crops of real photos, and copies that are degraded as by a broken camera."""

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

from tests import pictures

Change = Callable[[Image.Image], Image.Image]
# All photos in these packages, without charts, silhouettes and pages of text.
PHOTOS = {
    "skimage": (
        *("data/astronaut.png", "data/brick.png", "data/camera.png", "data/chelsea.png", "data/coffee.png"),
        *("data/coins.png", "data/grass.png", "data/gravel.png", "data/hubble_deep_field.jpg"),
        *("data/ihc.png", "data/moon.png", "data/motorcycle_left.png", "data/retina.jpg", "data/rocket.jpg"),
    ),
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
    "matplotlib": ("mpl-data/sample_data/grace_hopper.jpg",),
}
# Sides of the crops, as parts of the photo's own sides.
MIN_PART, MAX_PART, MAX_SIDE_PX = 0.45, 1.0, 640


def packaged() -> list[Path]:
    return [Path(str(files(package) / name)) for package, names in PHOTOS.items() for name in names]


def jpeg(photo: Image.Image) -> bytes:
    return pictures.save(photo, "JPEG", quality=90)


def crops(count: int) -> list[Image.Image]:
    """Return distinct crops of the photos of three packages, in turn; each is a photo of its own size."""
    rng = np.random.default_rng(1)
    return [_crop(_originals()[number % len(_originals())], rng) for number in range(count)]


@cache
def _originals() -> list[Image.Image]:
    photos = [Image.open(path).convert("RGB") for path in packaged()]
    for photo in photos:
        photo.thumbnail((1280, 1280))
    return photos


def _crop(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    width, height = (max(64, int(side * rng.uniform(MIN_PART, MAX_PART))) for side in photo.size)
    left = int(rng.integers(0, photo.width - width + 1))
    top = int(rng.integers(0, photo.height - height + 1))
    part = photo.crop((left, top, left + width, top + height))
    part.thumbnail((MAX_SIDE_PX, MAX_SIDE_PX))
    part = ImageEnhance.Brightness(part).enhance(rng.uniform(0.85, 1.15))
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else part


def dark(photo: Image.Image) -> Image.Image:
    return ImageEnhance.Brightness(photo).enhance(0.4)


def _strip(photo: Image.Image) -> Image.Image:
    return photo.crop((photo.width // 3, 0, 2 * photo.width // 3, photo.height))


def _other_camera(photo: Image.Image) -> Image.Image:
    """Return a photo with the white balance of another camera: more red, less blue."""
    red, green, blue = photo.split()
    return Image.merge(
        "RGB", (red.point(lambda level: level * 1.25), green, blue.point(lambda level: level * 0.8))
    )


# What happens to the photos, and the signal that must show it.
DEGRADED: dict[str, tuple[Change, str]] = {
    "dark": (dark, "brightness"),
    "blurred": (lambda photo: photo.filter(ImageFilter.GaussianBlur(max(photo.size) / 100)), "sharpness"),
    "cropped": (_strip, "aspect"),
    "another camera": (_other_camera, "warmth"),
}
