"""A new version of a network, staged: the file or folder that was given, copied whole and summed up."""

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

from nereid.errors import OperationFailed, WrongUsage
from nereid.repository import onnx_file
from nereid.repository.check import SUMS, digest

LABELS = "labels.txt"


def stage(source: Path, version_folder: Path, filename: str) -> None:
    """Copy a network into a new version folder, as its own files only; external data comes along.

    Args:
        source: an ONNX file, or a folder that holds one and its external data.
        version_folder: is made.
        filename: what the network is to be called.

    Raises:
        WrongUsage: there is no such file or folder, or not one network in it.
        OperationFailed: it is not ONNX, or its external data is missing or has a reserved name.
        OSError: something cannot be read or written.
    """
    network = _network(source, filename).resolve()  # external data lies beside the file itself
    file = onnx_file.read(network)
    onnx_file.check_external_data(file)
    copy = version_folder / filename
    parts = {Path(each.location) for each in file.external}
    for part in parts:
        _check_part(part, {network.name, copy.name})
    version_folder.mkdir(parents=True)
    # ONNX Runtime looks for external data beside the network.
    for origin, target in [(network, copy), *((network.parent / p, copy.parent / p) for p in parts)]:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, target)
        with target.open("rb") as copied:
            os.fsync(copied.fileno())


def check_labels(source: Path, folder: Path) -> None:
    """Refuse a folder whose labels are not those of the model it is to be a version of.

    Raises:
        OperationFailed: naming the first difference.
    """
    theirs, ours = source / LABELS, folder / LABELS
    if not theirs.is_file() or not ours.is_file():
        return
    new, old = (path.read_text(errors="replace").splitlines() for path in (theirs, ours))
    otherwise = "all versions of a model have the same labels; fix: nereid add it under another name"
    if len(new) != len(old):
        raise OperationFailed(f"{theirs} has {len(new)} labels, expected {len(old)}: {otherwise}")
    for number, (label, known) in enumerate(zip(new, old, strict=True), start=1):
        if label != known:
            raise OperationFailed(f"{theirs}, line {number}: expected '{known}', got '{label}': {otherwise}")


def write_checksums(version_folder: Path, source: Path, user: str) -> None:
    """Write the SHA-256 of every file of a version folder, as `sha256sum` has it, and who published it."""
    files = sorted(path for path in version_folder.rglob("*") if path.is_file())
    name = "".join(each if each.isprintable() else "?" for each in source.name)
    lines = [f"# published {datetime.now(UTC).isoformat(timespec='seconds')} by {user} from {name}"]
    lines += [f"{digest(path)}  {path.relative_to(version_folder)}" for path in files]
    (version_folder / SUMS).write_text("\n".join(lines) + "\n")


def _check_part(part: Path, networks: set[str]) -> None:
    """Refuse external data in the place of another file, or that would be taken for no part of a version."""
    mend = "fix: save it with another name"
    if part.name == SUMS or part.parts[0] in networks:
        raise OperationFailed(
            f"external data must not be called as another file of a version, '{part}'; {mend}"
        )
    if any(each.startswith(".") for each in part.parts):
        raise OperationFailed(f"external data must not be hidden, got '{part}'; {mend}")


def _network(source: Path, filename: str) -> Path:
    if not source.exists():
        raise WrongUsage(f"{source} does not exist")
    if not source.is_dir():
        return source
    found = [source / filename] if (source / filename).exists() else sorted(source.glob("*.onnx"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise WrongUsage(f"{source} must hold one ONNX file, it has: {names}")
    return onnx_file.network_path(source, {"default_model_filename": found[0].relative_to(source)})
