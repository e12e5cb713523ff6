"""A first run of a network on two images, in a child process: what it does there harms no command."""

from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime

from nereid.models.publish import child

# NumPy's types of images, by ONNX Runtime's words.
ELEMENTS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(uint8)": np.uint8}
# Largest difference of a row alone and in a batch, relative to its largest number: kernels may differ.
ROW_TOLERANCE = 0.02
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Shapes of the outputs by name, and whether the rows of a batch are independent.

    Args:
        shapes: those for one image.
        inferred: those that ONNX Runtime knows before a run, -1 for variable dims.
        computes_rows: whether each row of a batch gets what it gets alone.
    """

    shapes: dict[str, list[int]]
    inferred: dict[str, list[int]]
    computes_rows: bool


def try_network(path: Path) -> Trial | None:
    """Run a network of images; None if it fails, crashes or takes too long, which an examination explains."""
    try:
        _, content = child.run(__name__, str(path), TIMEOUT_S)
        return msgspec.convert(content, Trial)
    except (child.NoResult, msgspec.ValidationError):
        return None


def answer(path: str, write: child.Write) -> None:
    """Run the network, and write the results."""
    write("trial", asdict(run(Path(path))))


def run(path: Path) -> Trial:
    """Run the network in this process."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"], enable_fallback=0)
    (image,) = session.get_inputs()
    levels = np.random.default_rng(0).integers(0, 256, (2, *image.shape[1:])).astype(ELEMENTS[image.type])
    pixels = levels if levels.dtype == np.uint8 else levels / levels.dtype.type(255)
    alone = [session.run(None, {image.name: pixels[place : place + 1]}) for place in (0, 1)]
    names = [each.name for each in session.get_outputs()]
    shapes = {name: list(row.shape) for name, row in zip(names, alone[0], strict=True)}
    inferred = {
        each.name: [dim if isinstance(dim, int) else -1 for dim in each.shape]
        for each in session.get_outputs()
    }
    return Trial(shapes, inferred, _computes_rows(session, pixels, alone))


def _computes_rows(
    session: onnxruntime.InferenceSession, pixels: np.ndarray, alone: list[list[np.ndarray]]
) -> bool:
    if any(isinstance(each.shape[0], int) for each in session.get_outputs() if each.shape):
        return False
    try:
        together = session.run(None, {session.get_inputs()[0].name: pixels})
    except Exception:  # ONNX Runtime's own exceptions share no base class
        return False
    pairs = [(place, *each) for place in (0, 1) for each in zip(together, alone[place], strict=True)]
    return all(_is_row(found, place, row) for place, found, row in pairs)


def _is_row(found: np.ndarray, place: int, row: np.ndarray) -> bool:
    if found.shape != (2, *row.shape[1:]):
        return False
    limit = ROW_TOLERANCE * (np.abs(row).max(initial=0) or 1)
    return bool(np.allclose(found[place], row[0], rtol=0, atol=limit, equal_nan=True))
