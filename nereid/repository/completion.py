"""Configs to which Triton's completion at the load of a model adds nothing."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nereid.base.config.model_config import read_profile
from nereid.base.serving_errors import InvalidConfig
from nereid.repository.fitting import BACKENDS
from nereid.repository.triton_rules import completes_config

# A class with a base, or from another module, may inherit `auto_complete_config`.
PLAIN_CLASS = re.compile(r"^class TritonPythonModel *(\( *(object)? *\))? *:", re.MULTILINE)


def are_complete(repository: Path, profile: str, models: Collection[str]) -> bool:
    """Return whether the configs of all models are complete.

    Triton 24.10 completes them in a process of each model, which takes at least a second: it waits that long
    to learn whether the process is healthy.
    """
    return not any(why_incomplete(repository / name, profile) for name in models)


def why_incomplete(folder: Path, profile: str) -> str:
    """Return why Triton may add something to a model's config, empty if it adds nothing."""
    try:
        document = read_profile(folder, profile)
        missing = next((key for key in ("name", "input", "output") if not document.get(key)), "")
        return f"its config has no {missing}" if missing else _why_added_to(folder, document)
    except UnicodeDecodeError as error:
        return f"its model.py is expected in UTF-8: {error}"
    except (InvalidConfig, OSError) as error:
        return f"its files cannot be read: {error}"


def _why_added_to(folder: Path, document: Mapping[str, Any]) -> str:
    backend = document.get("backend")
    if backend in BACKENDS or document.get("platform") == "ensemble":
        return ""
    if backend == "python":
        codes = [path.read_text() for path in folder.glob("[0-9]*/model.py")]
        is_plain = bool(codes) and all(PLAIN_CLASS.search(code) for code in codes)
        return "" if is_plain and not completes_config(folder) else "its code may complete its config"
    return f"backend '{backend}' may complete its config" if backend else "its config has no backend"
