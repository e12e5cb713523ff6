"""The ONNX file of a version, and ONNX Runtime's sessions of it."""

from dataclasses import replace
from pathlib import Path

import onnxruntime

from nereid import files
from nereid.config.model_config import ModelConfig
from nereid.inference import io_binding as gpu
from nereid.inference import shared_weights, tensorrt
from nereid.inference.session_options import SessionSettings, Sharing
from nereid.inference.tensorrt import TENSORRT
from nereid.serving_errors import InvalidConfig, official_text


def path_of(config: ModelConfig) -> Path:
    """Return the ONNX file of `config`'s version; if that is a folder, `model.onnx` in it.

    Raises:
        InvalidConfig: the file does not exist.
    """
    name = config.document.get("default_model_filename") or "model.onnx"
    if config.kind == "GPU" and (by_capability := config.document.get("cc_model_filenames")):
        name = by_capability.get(gpu.compute_capability(config.device_id), name)
    path = config.folder / str(config.version) / name
    if path.is_dir():
        path /= "model.onnx"
    if not path.exists():
        raise InvalidConfig(f"unable to find '{path}' for model instance '{config.name}'")
    return path


def open_configured(config: ModelConfig, settings: SessionSettings) -> onnxruntime.InferenceSession:
    """Open the file of `config`'s version; its weights are shared if the settings say so.

    Raises:
        InvalidConfig: the file is missing, or cannot be opened with these settings.
    """
    path = path_of(config)
    if settings.sharing is not Sharing.OFF:
        place = shared_weights.folder_of(config.folder, config.version)
        return shared_weights.open_shared(path, place, settings, open_file)
    if TENSORRT in dict(settings.providers):
        return _open_tensorrt(path, config, settings)
    return open_file(path, settings)


def _open_tensorrt(
    path: Path, config: ModelConfig, settings: SessionSettings
) -> onnxruntime.InferenceSession:
    # The first instance builds the engine, and the others read it.
    with files.locked_folder(path.parent):
        providers = tuple(
            (name, tensorrt.with_engine_cache(options, config, path) if name == TENSORRT else options)
            for name, options in settings.providers
        )
        return open_file(path, replace(settings, providers=providers))


def open_file(path: Path, settings: SessionSettings) -> onnxruntime.InferenceSession:
    """Open `path` with exactly the configured providers: ONNX Runtime itself falls back to fewer.

    Raises:
        InvalidConfig: ONNX Runtime rejects the file, or has not all providers.
    """
    try:
        session = onnxruntime.InferenceSession(
            path, settings.options, providers=list(settings.providers), enable_fallback=0
        )
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        raise InvalidConfig(official_text(error)) from None
    missing = [name for name, _ in settings.providers if name not in session.get_providers()]
    if missing:
        raise InvalidConfig(
            f"onnx runtime: expected {missing[0]}, got only {', '.join(session.get_providers())}; "
            "its warnings above name the missing library"
        )
    return session
