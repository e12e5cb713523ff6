"""Locate a version's ONNX file, open it, and complete the config from it."""

import os
import re
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime

from nereid.base import files
from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InvalidConfig
from nereid.vision.inference import io_binding as gpu
from nereid.vision.inference import shared_weights, tensorrt, version_state
from nereid.vision.inference.run_failures import onnxruntime_error_text
from nereid.vision.inference.session_options import (
    BackendSettings,
    SessionSettings,
    Sharing,
    on_available_provider,
    session_settings,
)
from nereid.vision.inference.signature import Signature, complete, needs_completion
from nereid.vision.inference.tensorrt import TENSORRT

START_BYTES = 2**16
TO_ONNX = "export the network to ONNX"
# Files that users supply instead of an ONNX network: a pattern of their bytes, what they are, and the fix.
OTHER_FILES = (
    (rb"version https://git-lfs\.", "a Git LFS pointer", "git lfs pull"),
    (rb"(?i)\s*(<!--.*-->\s*)?<(!doctype )?html", "an HTML page", "download the file itself, not its page"),
    (rb"(?s)PK\x03\x04.*data\.pkl", "a PyTorch file", f"{TO_ONNX} with torch.onnx.export"),
    (rb"\x80[\x02-\x05]", "a PyTorch file or another pickle", f"{TO_ONNX} with torch.onnx.export"),
    (rb".{8}\{\s*\"", "a safetensors file, which has weights only", f"{TO_ONNX} with torch.onnx.export"),
    (rb"(?s)PK\x03\x04.*\.keras|\x89HDF", "a Keras file", f"{TO_ONNX} with tf2onnx"),
    (rb"(?s).*serving_default", "a TensorFlow SavedModel", f"{TO_ONNX} with tf2onnx"),
    (rb"(?s).{4}TFL3", "a TensorFlow Lite file", f"{TO_ONNX} with tf2onnx"),
    (rb"(?s).{4}ORTM", "a network in ONNX Runtime's format", "the ONNX file that it was made from"),
    (rb"[fp]trt", "a TensorRT engine", "the ONNX file that it was made from"),
    (rb"PK\x03\x04|\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd", "an archive", "unpack it"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF", "an image", "give the network's file"),
    (rb"[\t\n\f\r -~]*$", "a text file", "export it again"),
    (rb"\x08[\x01-\x20][\x12-\x7a]", "a truncated or incomplete network", "copy it, or export it again"),
    (rb"", "an unknown file", "export it again"),
)


def path_of(config: ModelConfig) -> Path:
    """Return the path of the version's ONNX file; if it is a folder, the path of `model.onnx` in it.

    Raises:
        InvalidConfig: the file does not exist.
    """
    name = config.document.get("default_model_filename") or "model.onnx"
    if config.device_kind == "GPU" and (by_capability := config.document.get("cc_model_filenames")):
        name = by_capability.get(gpu.compute_capability(config.device_id), name)
    path = config.folder / str(config.version) / name
    if path.is_dir():
        path /= "model.onnx"
    if not path.exists():
        raise InvalidConfig(f"unable to find '{path}' for model instance '{config.name}'")
    return path


def open_configured(config: ModelConfig, settings: SessionSettings) -> onnxruntime.InferenceSession:
    """Open the ONNX file of `config`'s version, with shared weights if `settings.sharing` requests them.

    Raises:
        InvalidConfig: the file is missing, or cannot be opened with these settings.
    """
    path = path_of(config)
    if settings.sharing is not Sharing.OFF:
        folder = version_state.folder_of(config.folder, config.version, shared_weights.FOLDER)
        return shared_weights.open_shared(path, folder, settings, open_file)
    if TENSORRT in dict(settings.providers):
        return _open_tensorrt(path, config, settings)
    return open_file(path, settings)


def _open_tensorrt(
    path: Path, config: ModelConfig, settings: SessionSettings
) -> onnxruntime.InferenceSession:
    # Under the lock, the first instance builds the engine and the others read it.
    with files.locked_folder(path.parent):
        providers = tuple(
            (name, tensorrt.with_engine_cache(options, config, path) if name == TENSORRT else options)
            for name, options in settings.providers
        )
        return open_file(path, replace(settings, providers=providers))


def describe_other(path: Path) -> tuple[str, str]:
    """Return what `path` is instead of an ONNX network, and the fix; only its start and end are read."""
    with path.open("rb") as file:
        start = file.read(START_BYTES)
        file.seek(max(0, file.seek(0, os.SEEK_END) - START_BYTES))
        start += file.read(START_BYTES)  # an archive lists its files at the end
    return next((kind, fix) for pattern, kind, fix in OTHER_FILES if re.match(pattern, start))


def open_file(path: Path, settings: SessionSettings) -> onnxruntime.InferenceSession:
    """Open `path` with all configured providers; by itself, ONNX Runtime would fall back to fewer.

    Raises:
        InvalidConfig: ONNX Runtime rejects the file, or cannot load a provider.
    """
    try:
        session = onnxruntime.InferenceSession(
            path, settings.options, providers=list(settings.providers), enable_fallback=0
        )
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        text = onnxruntime_error_text(error)
        if "Protobuf parsing failed" in str(error):
            kind, fix = describe_other(path)
            text += f" '{path.name}' is {kind}; fix: {fix}"
        raise InvalidConfig(text) from None
    missing = [name for name, _ in settings.providers if name not in session.get_providers()]
    if missing:
        raise InvalidConfig(
            f"onnx runtime: expected {missing[0]}, got only {', '.join(session.get_providers())}; "
            "its warnings above name the missing library"
        )
    return session


def complete_config(
    document: MutableMapping[str, Any],
    version_folder: Path,
    backend: BackendSettings,
    log: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Fill in the missing fields of `document`, a config with protobuf field names, from the ONNX file.

    Args:
        log, warn: receive lines for Triton's log.

    Raises:
        InvalidConfig: the file is missing, cannot be opened, or does not fit the config.
    """
    if not needs_completion(document):
        name = document["name"]
        log(f"skipping model configuration auto-complete for '{name}': inputs and outputs already specified")
        return
    is_gpu = any(group.get("kind") == "KIND_GPU" for group in document.get("instance_group", ()))
    config = ModelConfig.from_document(
        document, version_folder.parent, int(version_folder.name), "GPU" if is_gpu else "CPU"
    )
    config = on_available_provider(config, onnxruntime.get_available_providers(), backend.profile)
    # Optimize as the load does: constant folding may fix dims, and both must see the same ones.
    signature = Signature.of(open_file(path_of(config), session_settings(config, backend)))
    complete(document, signature, backend.default_max_batch_size, warn)
