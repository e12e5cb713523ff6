"""The description of a version, `description.json`: its source file, and the choices and changes for it."""

from pathlib import Path

import msgspec
from msgspec import Struct

from nereid.base.errors import OperationFailed
from nereid.models.publish.intake.adaptation import ActivationRule

FILENAME = "description.json"


class Description(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the network of a version comes from.

    Args:
        source: name of the user's ONNX file or folder.
        sha256: digest of that ONNX file, before the changes.
        output: the output with the scores; empty for the only one. The next version gets the same.
        activation: function to append, or `auto` to decide after a run. The next version gets the same.
        changes: what was changed in the file, one sentence each.
        task: of the network, which decides how the next version is changed.
        head: layout of a detector's outputs; empty for other networks.
    """

    source: str
    sha256: str
    output: str = ""
    activation: ActivationRule = "auto"
    changes: tuple[str, ...] = ()
    task: str = "classify"
    head: str = ""


def read(version_folder: Path) -> Description | None:
    """Return the description of a version; None for a version that was copied by hand.

    Raises:
        OperationFailed: the file is not a description.
    """
    path = version_folder / FILENAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Description)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise OperationFailed(f"'{path}': expected the description of a version, got: {error}") from None


def write(version_folder: Path, description: Description) -> None:
    """Write the description of a staged version."""
    text = msgspec.json.format(msgspec.json.encode(description), indent=2)
    (version_folder / FILENAME).write_bytes(text + b"\n")
