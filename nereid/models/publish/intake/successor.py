"""Changes of the next version of an added network: the same as those of the current version."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from msgspec.structs import replace as replace_fields

from nereid.models.publish.examination.examine import ExaminationRequest, Rejected, survey
from nereid.models.publish.intake import adaptation, description
from nereid.models.publish.intake.chosen_task import named_task
from nereid.models.publish.intake.description import Description
from nereid.repository import onnx_file

RECOGNISER = Description(source="", sha256="", task="read")


def adapt_successor(request: ExaminationRequest, source: Path, report: Callable[[str], None]) -> None:
    """Change a staged network as the current version was changed, and write its description.

    A network without a description was copied by hand: only its opset and IR version may change. A recogniser
    has only one form, so it is changed without a description, too.

    Args:
        request: the examination that follows, of the staged version.
        source: the user's file or folder.
        report: receives a line per change.

    Raises:
        WrongUsage: the output of the current version does not exist.
        Rejected: the network cannot be run, or does not compute batches like the current version.
    """
    assert request.current is not None
    path = onnx_file.network_path(request.candidate, request.document)
    past = description.read(request.current)
    if past is None and request.reader:
        past = RECOGNISER
    changes = adaptation.fit_file(path) if past is None else _repeat(request, path, past, source, report)
    for change in changes:
        report(f"changed: {change}")


def _repeat(
    request: ExaminationRequest,
    path: Path,
    past: Description,
    source: Path,
    report: Callable[[str], None],
) -> list[str]:
    original, document, task = onnx_file.read(path), request.document, named_task(past.task)
    assert request.current is not None
    (image,), outputs = document["input"], document["output"]
    names = [image["name"], *(each["name"] for each in outputs)]
    choices = task.input.repeated(path, onnx_file.network_path(request.current, document), past, image)
    content = path.read_bytes()
    adapted = task.adapt(path, choices, names=names)
    seen = survey(replace(request, current=None), progress=lambda line: report(f"examination: {line}"))
    if not seen.can_batch and int(document.get("max_batch_size", 0)) > 1:
        raise Rejected(
            f"the network computes one {task.input.unit} at a time, but the current version computes batches"
        )
    path.write_bytes(content)
    activation = task.activation(choices, seen)
    adapted = task.adapt(path, choices, activation, names)
    found = replace_fields(past, source=source.name, sha256=original.sha256, changes=tuple(adapted.changes))
    description.write(request.candidate, found)
    for note in adapted.notes:
        report(f"note: {note}")
    return adapted.changes
