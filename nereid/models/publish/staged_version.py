"""The staged files of a new version: a complete copy of the given network, with checksums."""

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from nereid.base.errors import OperationFailed, WrongUsage
from nereid.base.task_registry import DEFAULT_TASK
from nereid.base.units import split_lines
from nereid.models.publish.importing.graph_edits import ActivationRule
from nereid.repository import onnx_file
from nereid.repository.checksums import CHECKSUMS, digest

DESCRIPTION = "description.json"


class Description(Struct, frozen=True, forbid_unknown_fields=True):
    """The origin of a version's network.

    Args:
        source: name of the user's ONNX file or folder.
        sha256: digest of that ONNX file, before the changes.
        output: the output with the scores; empty if it is the only one. The next version uses the same.
        activation: function to append, or `auto` to decide after a run. The next version uses the same.
        changes: what was changed in the file, one sentence each.
        task: the network's task, which decides how the next version is changed.
        head: layout of a detector's outputs; empty for other networks.
    """

    source: str
    sha256: str
    output: str = ""
    activation: ActivationRule = "auto"
    changes: tuple[str, ...] = ()
    task: str = DEFAULT_TASK.name
    head: str = ""


def read_description(version_folder: Path) -> Description | None:
    """Return the description of a version; None for a version that was copied by hand.

    Raises:
        OperationFailed: the file is not a description.
    """
    path = version_folder / DESCRIPTION
    try:
        return msgspec.json.decode(path.read_bytes(), type=Description)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise OperationFailed(f"'{path}': expected the description of a version, got: {error}") from None


def write_description(version_folder: Path, description: Description) -> None:
    """Write the description of a staged version."""
    content = msgspec.json.format(msgspec.json.encode(description), indent=2)
    (version_folder / DESCRIPTION).write_bytes(content + b"\n")


LABELS = "labels.txt"


def stage(source: Path, version_folder: Path, filename: str) -> None:
    """Copy an ONNX file (given itself or by its folder) and its external data into a new version folder.

    Raises:
        WrongUsage: the file or folder does not exist, or does not contain exactly one network.
        OperationFailed: it is not ONNX, or its external data is missing or has a reserved name.
    """
    # External data is next to the file itself, not next to a link to it.
    network = network_file(source, filename).resolve()
    file = onnx_file.read(network)
    onnx_file.check_external_data(file)
    copy = version_folder / filename
    parts = {Path(data.location) for data in file.external}
    for part in parts:
        _check_part(part, {network.name, copy.name})
    version_folder.mkdir(parents=True)
    # ONNX Runtime reads external data from the network's folder.
    for origin, target in [(network, copy), *((network.parent / p, copy.parent / p) for p in parts)]:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, target)
        with target.open("rb") as copied:
            os.fsync(copied.fileno())


def check_labels(source: Path, folder: Path) -> None:
    """Reject a folder whose labels differ from the model's."""
    new_file, model_file = source / LABELS, folder / LABELS
    if not new_file.is_file() or not model_file.is_file():
        return
    new, old = (
        split_lines(path.read_text(encoding="utf-8-sig", errors="replace")) for path in (new_file, model_file)
    )
    fix = "all versions of a model have the same labels; fix: nereid add it under another name"
    if len(new) != len(old):
        raise OperationFailed(f"'{new_file}': expected {len(old)} labels, got {len(new)}: {fix}")
    for number, (label, expected) in enumerate(zip(new, old, strict=True), start=1):
        if label != expected:
            raise OperationFailed(f"'{new_file}', line {number}: expected '{expected}', got '{label}': {fix}")


def write_checksums(version_folder: Path, source: Path, user: str) -> None:
    """Write the SHA-256 of every file in the format of `sha256sum`, with time, user and source."""
    files = sorted(path for path in version_folder.rglob("*") if path.is_file())
    name = "".join(character if character.isprintable() else "?" for character in source.name)
    lines = [f"# published {datetime.now(UTC).isoformat(timespec='seconds')} by {user} from {name}"]
    lines += [f"{digest(path)}  {path.relative_to(version_folder)}" for path in files]
    (version_folder / CHECKSUMS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _check_part(part: Path, networks: set[str]) -> None:
    fix = "fix: save the network with another name for its external data"
    if part.name == CHECKSUMS or part.parts[0] in networks:
        raise OperationFailed(f"external data has the name of another file of the version, '{part}'; {fix}")
    if any(word.startswith(".") for word in part.parts):
        raise OperationFailed(f"external data is a hidden file, '{part}'; {fix}")


def network_file(source: Path, filename: str) -> Path:
    """Return the ONNX file of a source: the file itself, or the only one in the folder; else WrongUsage."""
    if not source.exists():
        raise WrongUsage(f"'{source}' does not exist")
    if not source.is_dir():
        return source
    networks = [source / filename] if (source / filename).exists() else sorted(source.glob("*.onnx"))
    if len(networks) != 1:
        names = ", ".join(path.name for path in networks) or "none"
        is_tensorflow = (source / "saved_model.pb").exists()
        fix = "; fix: export the TensorFlow SavedModel with tf2onnx" if is_tensorflow else ""
        raise WrongUsage(f"'{source}': expected one ONNX file in the folder, got: {names}{fix}")
    return onnx_file.network_path(source, {"default_model_filename": networks[0].relative_to(source)})
