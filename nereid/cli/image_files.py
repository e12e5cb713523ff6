"""Image files among the arguments of a command."""

from collections.abc import Sequence
from pathlib import Path

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


def collect(paths: Sequence[Path]) -> list[Path]:
    """Return the files among `paths` and the images in its folders, sorted within each folder.

    Raises:
        ValueError: a path does not exist, or a folder holds no image.
    """
    return [image for path in paths for image in _images(path)]


def images_in(folder: Path) -> list[Path]:
    """Return the images in a folder and its subfolders, sorted."""
    # Only regular files: reading a named pipe would block.
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())


def _images(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"'{path}' does not exist")
    if not path.is_dir():
        return [path]
    if not (images := images_in(path)):
        raise ValueError(f"'{path}' has no image, expected {', '.join(sorted(SUFFIXES))}")
    return images
