"""Changes of the next version of an added network: the same as those of the current version."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nereid.errors import WrongUsage
from nereid.publish.examination.examine import ExaminationRequest, Rejected, Survey, survey
from nereid.publish.intake import adaptation, description
from nereid.publish.intake.adaptation import Activation, ActivationRule, Choices
from nereid.publish.intake.description import Description
from nereid.repository import onnx_file


def adapt_successor(request: ExaminationRequest, source: Path, report: Callable[[str], None]) -> None:
    """Change a staged network as the current version was changed, and write its description.

    A network without a description was copied by hand: only its opset and IR version may change.

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
    original, document = onnx_file.read(path), request.document
    names = (document["input"][0]["name"], document["output"][0]["name"])
    content = path.read_bytes()
    adaptation.adapt_file(path, Choices(past.output, names=names))
    seen = survey(replace(request, current=None), progress=lambda line: report(f"examination: {line}"))
    if not seen.can_batch and int(document.get("max_batch_size", 0)) > 1:
        raise Rejected("the network computes one image at a time, but the current version computes batches")
    path.write_bytes(content)
    activation = activation_to_append(past.activation, seen)
    _, changes = adaptation.adapt_file(path, Choices(past.output, activation, names))
    found = Description(source.name, original.sha256, past.output, past.activation, tuple(changes))
    description.write(request.candidate, found)
    return changes


def activation_to_append(rule: ActivationRule, seen: Survey) -> Activation:
    """Return the activation to append to scores that were seen in a first run.

    Raises:
        WrongUsage: the rule is an activation, but the scores are probabilities already.
    """
    if rule not in ("auto", "none") and seen.activation == "none":
        raise WrongUsage(
            f"cannot append a {rule}: the scores are probabilities already; fix: leave out --activation"
        )
    return seen.activation if rule == "auto" else rule
