"""Photos for the drift monitor: crops of real photos, and copies that are degraded as by a broken camera."""

import io
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

# All photos in these packages, without charts, silhouettes and pages of text.
PHOTOS = {
    "skimage": [
        f"data/{name}"
        for name in (
            *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png"),
            *("grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png"),
            *("motorcycle_left.png", "retina.jpg", "rocket.jpg"),
        )
    ],
    "sklearn": ["datasets/images/china.jpg", "datasets/images/flower.jpg"],
    "matplotlib": ["mpl-data/sample_data/grace_hopper.jpg"],
}
JPEG_QUALITY = 90
# Sides of the crops, as parts of the photo's own sides.
MIN_PART, MAX_PART = 0.45, 1.0
MAX_SIDE_PX = 640


def packaged() -> list[Path]:
    """List the photos of the packages in PHOTOS."""
    return [Path(str(files(package) / name)) for package, names in PHOTOS.items() for name in names]


def crops(count: int, seed: int = 1) -> list[Image.Image]:
    """Return distinct crops of the photos of three packages, in turn; each is a photo of its own size."""
    rng = np.random.default_rng(seed)
    photos = originals()
    return [_crop(photos[number % len(photos)], rng) for number in range(count)]


@cache
def originals() -> tuple[Image.Image, ...]:
    """Return the photos in RGB."""
    found = []
    for path in packaged():
        with Image.open(path) as image:
            photo = image.convert("RGB")
        photo.thumbnail((1280, 1280))
        found.append(photo)
    return tuple(found)


def _crop(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    width, height = (max(64, int(side * rng.uniform(MIN_PART, MAX_PART))) for side in photo.size)
    left = int(rng.integers(0, photo.width - width + 1))
    top = int(rng.integers(0, photo.height - height + 1))
    part = photo.crop((left, top, left + width, top + height))
    part.thumbnail((MAX_SIDE_PX, MAX_SIDE_PX))
    part = ImageEnhance.Brightness(part).enhance(rng.uniform(0.85, 1.15))
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else part


def dark(photo: Image.Image) -> Image.Image:
    """Return a photo with 40 % of its light."""
    return ImageEnhance.Brightness(photo).enhance(0.4)


def blurred(photo: Image.Image) -> Image.Image:
    """Return a photo that is out of focus."""
    return photo.filter(ImageFilter.GaussianBlur(max(photo.size) / 100))


def cropped(photo: Image.Image) -> Image.Image:
    """Return a vertical strip of a photo, as after a wrong crop."""
    width, height = photo.size
    return photo.crop((width // 3, 0, 2 * width // 3, height))


def other_camera(photo: Image.Image) -> Image.Image:
    """Return a photo with the white balance of another camera: more red, less blue."""
    red, green, blue = photo.split()
    return Image.merge(
        "RGB", (red.point(lambda level: level * 1.25), green, blue.point(lambda level: level * 0.8))
    )


# What happens to the photos, and the signals that must show it.
DEGRADED: Mapping[str, tuple[Callable[[Image.Image], Image.Image], frozenset[str]]] = {
    "dark": (dark, frozenset({"brightness"})),
    "blurred": (blurred, frozenset({"sharpness"})),
    "cropped": (cropped, frozenset({"aspect"})),
    "another camera": (other_camera, frozenset({"warmth"})),
}


def jpeg(photo: Image.Image) -> bytes:
    """Encode a photo."""
    target = io.BytesIO()
    photo.save(target, "JPEG", quality=JPEG_QUALITY)
    return target.getvalue()
