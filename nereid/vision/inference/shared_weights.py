"""One copy of a network's weights for all instances, in files that every process maps into memory.

An instance is a process, and ONNX Runtime keeps weights on its heap twice: in the file's layout and in its
kernels' layout. The first instance writes both to a folder next to the repository, and all instances map
them.

ONNX Runtime writes the kernels' layout directly after the file's, at any offset, but its kernels load whole
cache lines and crash if these are not aligned. The written weights are therefore moved to multiples of
`ALIGNMENT`.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import onnxruntime

from nereid.base import files
from nereid.base.errors import InvalidConfig
from nereid.base.processes import return_memory
from nereid.vision.inference import version_state
from nereid.vision.inference.session_options import CPU, SHARED_WEIGHTS, SessionSettings

FOLDER, PARTIAL = "weights", ".partial"
FORM = "aligned"  # change this with the written form, so that an earlier release's copies are not used
ERROR = 3  # an ONNX Runtime log level
MODEL, WEIGHTS = "model.onnx", "weights.bin"
# Smaller tensors stay in the model file: only whole pages, of 4096 bytes, are shared.
MIN_BYTES = 4096
SAVE_ENTRIES = {
    "session.optimized_model_external_initializers_file_name": WEIGHTS,
    "session.optimized_model_external_initializers_min_size_in_bytes": str(MIN_BYTES),
    "session.save_external_prepacked_constant_initializers": "1",
}
ALIGNMENT = 64  # bytes in a cache line, and in the widest registers
# Location of a kernel's layout in a value of `external_data`: KEY|OFFSET;LENGTH;CHECKSUM|…
# Source: onnxruntime/core/framework/external_data_loader.cc and prepacked_weights_container.cc.
PLACE = re.compile(r"(?<=[|])(\d+);(\d+)(?=;)")
# The part of ONNX's schema that locates weights. Source: onnx/onnx.proto.
SCHEMA = {
    "Model": {"graph": (7, "Graph")},
    "Graph": {"node": (1, "Node*"), "initializer": (5, "Tensor*"), "input": (11, "Value*")},
    "Node": {"attribute": (5, "Attribute*")},
    "Attribute": {"g": (6, "Graph"), "graphs": (11, "Graph*")},
    "Tensor": {"name": (8, ""), "external_data": (13, "Entry*")},
    "Entry": {"key": (1, ""), "value": (2, "")},
    "Value": {"name": (1, "")},
}
Open = Callable[[Path, SessionSettings], onnxruntime.InferenceSession]


def open_shared(
    path: Path, copies_folder: Path, settings: SessionSettings, opener: Open
) -> onnxruntime.InferenceSession:
    """Open the optimized, mapped form of model file `path`; the first caller writes it to `copies_folder`.

    Raises:
        InvalidConfig: `copies_folder` is not writable, the instance is not on a CPU, or the file cannot be
            opened.
    """
    if [name for name, _ in settings.providers] != [CPU]:
        raise InvalidConfig(f"{SHARED_WEIGHTS}: expected {CPU} only, got {settings.providers[0][0]}")
    options = settings.options
    try:
        with files.locked_folder(path.parent):
            # Also digest the files under the lock: they may change while this instance waits for it.
            folder = copies_folder / _key(path, settings)
            if not folder.exists():
                _write(path, folder, settings, opener)
            os.utime(folder)
    except OSError as error:
        raise InvalidConfig(
            f"{SHARED_WEIGHTS}: expected a writable folder '{copies_folder}': {error}"
        ) from None
    # The written form is already optimized; optimizing it again would copy the mapped weights.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = opener(folder / MODEL, settings)
    # ONNX Runtime packed every weight again to find its copy in the file; release the heap this used.
    return_memory()
    return session


def _key(path: Path, settings: SessionSettings) -> str:
    """Return a digest of what the written form depends on: files, options, CPU and ONNX Runtime's version."""
    level = settings.options.graph_optimization_level.name
    return version_state.digest(path, FORM, onnxruntime.__version__, level, *settings.extras, _processor())


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "".join(
        next((line for line in lines if line.startswith(word)), "") for word in ("model name", "flags")
    )


def _write(path: Path, folder: Path, settings: SessionSettings, opener: Open) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    version_state.remove_old(folder.parent, PARTIAL)
    partial = folder.with_suffix(PARTIAL)
    partial.mkdir()
    options = settings.options
    for key, value in SAVE_ENTRIES.items():
        options.add_session_config_entry(key, value)
    options.optimized_model_filepath = str(partial / MODEL)
    verbosity = options.log_severity_level
    options.log_severity_level = ERROR  # ONNX Runtime warns about the intended settings
    try:
        session = opener(path, settings)
        _arrange(partial, {node.name for node in session.get_inputs()})
        options.optimized_model_filepath, options.log_severity_level = "", verbosity
        for file in partial.iterdir():
            files.sync(file)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _arrange(folder: Path, inputs: Collection[str]) -> None:
    model = message_class(SCHEMA).FromString((folder / MODEL).read_bytes())
    present = {weight.name for weight in model.graph.initializer}
    kept = [tensor for tensor in model.graph.input if tensor.name in inputs or tensor.name in present]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    source, target = folder / WEIGHTS, folder / f"{WEIGHTS}.aligned"
    if source.exists():
        with source.open("rb") as old, target.open("wb") as new:
            for entries in _external(model.graph):
                _move(entries, old, new)
        target.rename(source)
    (folder / MODEL).write_bytes(model.SerializeToString())


def _external(graph: Any) -> Iterator[dict[str, Any]]:
    """Yield the entries, by key, of each tensor stored outside the model file, subgraphs included."""
    for tensor in graph.initializer:
        if tensor.external_data:
            yield {entry.key: entry for entry in tensor.external_data}
    for node in graph.node:
        for attribute in node.attribute:
            for subgraph in (attribute.g, *attribute.graphs):
                yield from _external(subgraph)


def _move(entries: dict[str, Any], old: BinaryIO, new: BinaryIO) -> None:
    """Copy a tensor and its kernels' layouts to aligned offsets, and update the entries."""

    def copied(offset: int, length: int) -> int:
        new.write(b"\0" * (-new.tell() % ALIGNMENT))
        begin = new.tell()
        old.seek(offset)
        new.write(old.read(length))
        return begin

    offset = entries["offset"]
    offset.value = str(copied(int(offset.value), int(entries["length"].value)))
    for key, entry in entries.items():
        if key.startswith("prepacked"):
            entry.value = PLACE.sub(
                lambda match: f"{copied(int(match[1]), int(match[2]))};{match[2]}", entry.value
            )


# Message -> field -> its number, and its message, or "" for text; `*` marks a repeated field.
Schema = Mapping[str, Mapping[str, tuple[int, str]]]


def message_class(schema: Schema) -> Any:
    """Return the class of the first message of a schema."""
    # Imported here because protobuf slows the start of each command.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="messages.proto", package="messages")
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for field, (number, target) in fields.items():
            message.field.add(
                name=field,
                number=number,
                label=kinds.LABEL_REPEATED if target.endswith("*") else kinds.LABEL_OPTIONAL,
                type=kinds.TYPE_MESSAGE if target else kinds.TYPE_STRING,
                type_name=f".messages.{target.rstrip('*')}" if target else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"messages.{next(iter(schema))}"))
