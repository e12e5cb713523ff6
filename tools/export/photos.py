"""Freely licensed photos from packages, to calibrate and to compare a quantised network.

The photos of the known-answer tests (scikit-image's coffee and chelsea) are not among them.
"""

import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image

# Packages of Debian 12; their licences (CC0, CC-BY, CC-BY-SA) are in /usr/share/doc/*/copyright.
PACKAGES = (
    "lomiri-wallpapers-16.04",
    "lomiri-wallpapers-20.04",
    "mate-backgrounds",
    "plasma-workspace-wallpapers",
)
IN_PYTHON = (
    ("skimage", "data/astronaut.png"),
    ("skimage", "data/retina.jpg"),
    ("skimage", "data/hubble_deep_field.jpg"),
    ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
)
CALIBRATION = ("share/backgrounds/*_by_*.jpg", "share/wallpapers/*/contents/images/2560x1600.jpg")
HELD_OUT = ("share/backgrounds/mate/nature/*.jpg",)


def fetch(folder: Path) -> None:
    """Download the Debian packages and unpack them into `folder`; run `apt-get update` first."""
    if (folder / "usr").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, folder], check=True)


def calibration(folder: Path) -> list[Path]:
    """List the photos whose crops determine the quantisation ranges."""
    return _matching(folder, CALIBRATION) + [Path(str(files(p) / name)) for p, name in IN_PYTHON]


def held_out(folder: Path) -> list[Path]:
    """List the held-out photos, which are only for the comparison."""
    return _matching(folder, HELD_OUT)


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    paths = sorted(path for pattern in patterns for path in (folder / "usr").glob(pattern))
    if not paths:
        raise SystemExit(
            f"error: '{folder}/usr': expected photos that match {', '.join(patterns)}, got none; "
            f"fix: delete '{folder}' to download the photos again"
        )
    return paths


def crops(photos: list[Path], per_photo: int, seed: int) -> Iterator[np.ndarray]:
    """Yield inputs of the network, float32[1, 3, 224, 224]: RGB, (pixel - 127) / 128.

    Each crop is a square of 30..100 % of a photo's shorter side, half of the crops mirrored.
    """
    random = np.random.default_rng(seed)
    for path in photos:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        for _ in range(per_photo):
            side = int(min(image.size) * random.uniform(0.3, 1))
            left, top = (int(random.integers(0, extent - side + 1)) for extent in image.size)
            crop = image.resize((224, 224), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
            pixels = np.asarray(crop, np.float32)[:, :: random.choice((-1, 1))]
            yield np.ascontiguousarray((pixels - 127).transpose(2, 0, 1)[None] / 128)
