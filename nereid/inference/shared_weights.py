"""One copy of a network's weights for all instances: files that every process maps, and the kernel shares.

An instance is a process, and ONNX Runtime keeps weights on the heap twice: in the layout of the file and in
that of its kernels. The first instance writes both to a folder next to the repository, and all instances map
them.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnxruntime

from nereid import files
from nereid.inference import version_state
from nereid.inference.session_options import CPU, SHARED_WEIGHTS, SessionSettings
from nereid.processes import return_memory
from nereid.serving_errors import InvalidConfig

FOLDER, PARTIAL = "weights", ".partial"
ERROR = 3  # of ONNX Runtime's log levels
MODEL, WEIGHTS = "model.onnx", "weights.bin"
# Smaller tensors stay in the model file: a page has 4 kB, and only whole pages are shared.
MIN_BYTES = 4096
SAVE_ENTRIES = {
    "session.optimized_model_external_initializers_file_name": WEIGHTS,
    "session.optimized_model_external_initializers_min_size_in_bytes": str(MIN_BYTES),
    "session.save_external_prepacked_constant_initializers": "1",
}
Open = Callable[[Path, SessionSettings], onnxruntime.InferenceSession]


def folder_of(model: Path, version: int) -> Path:
    """Return the folder for the copies of a version, outside of the version, as versions never change."""
    return version_state.folder_of(model, version, FOLDER)


def open_shared(
    path: Path, place: Path, settings: SessionSettings, opener: Open
) -> onnxruntime.InferenceSession:
    """Open the optimized, mapped form of the model file `path`; the first caller writes it to `place`.

    Raises:
        InvalidConfig: `place` is not writable, the instance is not on a CPU, or the file cannot be opened.
    """
    if [name for name, _ in settings.providers] != [CPU]:
        raise InvalidConfig(f"{SHARED_WEIGHTS}: expected {CPU} only, got {settings.providers[0][0]}")
    options = settings.options
    try:
        with files.locked_folder(path.parent):
            # Another instance renames its folder under the lock, so the files are read under it, too.
            folder = place / _key(path, settings)
            if not folder.exists():
                _write(path, folder, settings, opener)
            os.utime(folder)
    except OSError as error:
        raise InvalidConfig(f"{SHARED_WEIGHTS}: expected a writable folder '{place}': {error}") from None
    # The written form is optimized already; a second optimization would copy the mapped weights.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = opener(folder / MODEL, settings)
    # ONNX Runtime packed every weight again to find its copy in the file; this frees that part of the heap.
    return_memory()
    return session


def _key(path: Path, settings: SessionSettings) -> str:
    """Return a digest of all that the written form depends on: files, ONNX Runtime, CPU and options."""
    level = settings.options.graph_optimization_level.name
    return version_state.digest(path, onnxruntime.__version__, level, *settings.extras, _processor())


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "".join(
        next((line for line in lines if line.startswith(word)), "") for word in ("model name", "flags")
    )


def _write(path: Path, folder: Path, settings: SessionSettings, opener: Open) -> None:
    """Write `folder` atomically, and remove old ones."""
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
        opener(path, settings)
        options.optimized_model_filepath, options.log_severity_level = "", verbosity
        for each in partial.iterdir():
            files.sync(each)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
