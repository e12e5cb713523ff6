"""Parameters of a `text_reader` model."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nereid.base.config.model_config import ModelConfig, TensorSpec
from nereid.base.contract import (
    BARCODE,
    BARCODE_BOX,
    BARCODE_PAGE,
    BOX,
    CONFIDENCE,
    FIELD,
    IMAGE,
    MAX_IMAGE_BYTES,
    MAX_LINES,
    PAGE,
    PAGE_SIZE,
    SYMBOLOGY,
    TEXT,
)
from nereid.base.task import AS_MODELS, IN_PROCESS
from nereid.tasks.read import READ, READER_PARTS

BACKEND = READ.backend.name if READ.backend else ""
MAX_PAGES = 1000
# A newspaper page has about 400 lines, a dense letter 60; a page of 1,000 takes one core 8 s.
DEFAULT_MAX_LINES, DEFAULT_MAX_READ_S, DEFAULT_MAX_PAGES = 500, 30.0, 20


@dataclass(frozen=True, slots=True)
class ReadingSettings:
    """The networks of a reader, by name and pinned version, and the limits on images and lines.

    `networks` is `in_process` or `served`, that is as models on the same server. `intra_op_thread_count`
    overrides the thread count of in-process networks; 0 keeps their own. Lines below `min_confidence` are
    dropped. `fields` names a file with the fields of a document, in the version's or the model's folder. A
    file is rejected if a page has more than `max_lines` text regions, if its pages take more than
    `max_read_s` each, or if it has more than `max_pages`.
    """

    network: str
    network_version: int
    detect: str
    detect_version: int
    direction: str
    direction_version: int
    networks: str = AS_MODELS
    intra_op_thread_count: int = 0
    min_confidence: float = 0.5
    fields: str = ""
    max_lines: int = DEFAULT_MAX_LINES
    max_read_s: float = DEFAULT_MAX_READ_S
    max_pages: int = DEFAULT_MAX_PAGES
    max_image_bytes: int = MAX_IMAGE_BYTES
    max_image_pixels: int = 64_000_000
    max_image_side_px: int = 16_384

    def __post_init__(self) -> None:
        if self.networks not in (IN_PROCESS, AS_MODELS):
            raise ValueError(f"networks: expected {IN_PROCESS} or {AS_MODELS}, got '{self.networks}'")
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(f"min_confidence: expected 0 to 1, got {self.min_confidence}")
        if not 1 <= self.max_lines <= MAX_LINES:
            raise ValueError(f"max_lines: expected 1 to {MAX_LINES}, got {self.max_lines}")
        if not 1 <= self.max_pages <= MAX_PAGES:
            raise ValueError(f"max_pages: expected 1 to {MAX_PAGES}, got {self.max_pages}")
        if self.max_read_s <= 0:
            raise ValueError(f"max_read_s: expected more than 0, got {self.max_read_s}")
        if self.fields != Path(self.fields).name:
            raise ValueError(f"fields: expected the name of a file without folders, got '{self.fields}'")

    @property
    def parts(self) -> dict[str, tuple[str, int]]:
        """Return the model and version of each network, by parameter name."""
        return {part: (getattr(self, part), getattr(self, f"{part}_version")) for part in READER_PARTS}

    @property
    def network_overrides(self) -> dict[str, str]:
        """Return parameters that override each in-process network's."""
        threads = self.intra_op_thread_count
        return {"intra_op_thread_count": str(threads)} if threads else {}

    @property
    def is_in_process(self) -> bool:
        """Whether the networks run in the reader's process."""
        return self.networks == IN_PROCESS


def _tensor(name: str, datatype: str, *dims: int) -> TensorSpec:
    return TensorSpec(name, f"TYPE_{datatype}", dims, dims)


INPUTS = (_tensor(IMAGE, "STRING", 1),)
LINE_OUTPUTS = (_tensor(TEXT, "STRING", -1), _tensor(CONFIDENCE, "FP32", -1), _tensor(BOX, "FP32", -1, 4, 2))
FIELD_OUTPUTS = (_tensor(FIELD, "STRING", -1),)
BARCODE_OUTPUTS = (
    _tensor(BARCODE, "STRING", -1),
    _tensor(SYMBOLOGY, "STRING", -1),
    _tensor(BARCODE_BOX, "FP32", -1, 4, 2),
)
PAGE_OUTPUTS = (
    _tensor(PAGE, "INT32", -1),
    _tensor(BARCODE_PAGE, "INT32", -1),
    _tensor(PAGE_SIZE, "INT32", -1, 2),
)
# Inputs and outputs of each network, in order; tensor names are arbitrary.
TENSORS = {
    "detect": (_tensor("", "FP32", 3, -1, -1), [_tensor("", "FP32", 1, -1, -1)]),
    "direction": (_tensor("", "FP32", 3, 48, 192), [_tensor("", "FP32", 2)]),
    "network": (
        _tensor("", "FP32", 3, 48, -1),
        [_tensor("", datatype, -1) for datatype in ("INT64", "FP32", "INT64", "FP32")],
    ),
}
# A recogniser may return only the best character of each step.
MIN_OUTPUTS = {"network": 2}


def own_problems(config: ModelConfig, settings: ReadingSettings) -> Iterator[str]:
    """Yield what is wrong with the reader's own tensors."""
    outputs = (
        *LINE_OUTPUTS,
        *(FIELD_OUTPUTS if settings.fields else ()),
        *(BARCODE_OUTPUTS if has_output(config, BARCODE) else ()),
        *(PAGE_OUTPUTS if has_output(config, PAGE) else ()),
    )
    for side, required, configured in (("input", INPUTS, config.inputs), ("output", outputs, config.outputs)):
        expected, got = (
            ", ".join(f"'{tensor.name}' {tensor.type_and_dims}" for tensor in tensors)
            for tensors in (required, configured)
        )
        if expected != got:
            yield f"expected the {side}s {expected}, got {got or 'none'}"


def has_output(config: ModelConfig, name: str) -> bool:
    """Return whether a reader has an output, such as the one for barcodes or pages."""
    return any(output.name == name for output in config.outputs)


def fields_path(config: ModelConfig, settings: ReadingSettings) -> Path | None:
    """Return the file with the fields of a document; None if the reader has none."""
    if not settings.fields:
        return None
    path = config.folder / str(config.version) / settings.fields
    return path if path.exists() else config.folder / settings.fields


def tensor_problems(part: str, network: ModelConfig) -> Iterator[str]:
    """Yield a network's tensors that do not suit a reader.

    Args:
        part: one of READER_PARTS.
    """
    input_tensor, output_tensors = TENSORS[part]
    if len(network.outputs) == MIN_OUTPUTS.get(part):
        output_tensors = output_tensors[: MIN_OUTPUTS[part]]
    if network.max_batch_size < 1:
        yield f"'{network.name}': expected max_batch_size 1 or more, got {network.max_batch_size}"
    for side, required, configured in (
        ("inputs", [input_tensor], network.inputs),
        ("outputs", output_tensors, network.outputs),
    ):
        if len(required) != len(configured) or not all(map(_takes, required, configured)):
            kinds = (
                ", ".join(tensor.type_and_dims for tensor in tensors) or "none"
                for tensors in (required, configured)
            )
            yield "'{}', {} of '{}': expected {}, got {}".format(part, side, network.name, *kinds)


def _takes(required: TensorSpec, tensor: TensorSpec) -> bool:
    """Return whether a tensor has the datatype, and leaves open every dim that varies between images."""
    is_open = all(dim == -1 for need, dim in zip(required.dims, tensor.dims, strict=False) if need == -1)
    return required.fits(tensor) and is_open
