"""Checks of a network's outputs, and their comparison with those of the current version."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from nereid.config.model_config import read_pbtxt
from nereid.publish.examination.examine import ExaminationRequest, Gates, Rejected
from nereid.publish.examination.found_objects import FoundObjects
from nereid.publish.examination.measurements import Network
from nereid.publish.examination.output_meaning import Answers
from nereid.publish.examination.read_lines import ReadLines
from nereid.publish.examination.samples import Arrays, Sample
from nereid.publish.examination.score_outputs import Scores
from nereid.text.reading_settings import BACKEND as READER

# By the backend of the model after the network, or of the reader.
MEANINGS: Mapping[str, Callable[[ExaminationRequest], Answers]] = {
    "boxes": FoundObjects,
    READER: ReadLines,
}


def answers_of(request: ExaminationRequest) -> Answers:
    """Return what the outputs of a network mean.

    Raises:
        InvalidConfig: the model after the network, or the reader, cannot be read.
    """
    model = request.after or request.reader
    if not model:
        return Scores(request)
    return MEANINGS[read_pbtxt(model / "config.pbtxt").get("backend", "")](request)


def check_outputs(
    gates: Gates,
    answers: Answers,
    network: Network,
    current: Network | None,
    samples: Sequence[Sample],
    notes: list[str],
) -> float | None:
    """Compare the outputs with those of the current version; return the largest difference.

    Raises:
        Rejected: an output is not finite, or differs by more than the tolerance.
    """
    outputs = [network.run(sample) for sample in samples]
    for sample, arrays in zip(samples, outputs, strict=True):
        check_finite(arrays, sample.name)
    notes += answers.notes(network.config, samples, outputs)
    if not current:
        return None
    changes = answers.changes(samples, [current.run(sample) for sample in samples], outputs)
    greatest, text = max(changes, key=lambda each: each.difference, default=(0.0, ""))
    if greatest > gates.tolerance:
        if not gates.is_change_accepted:
            raise Rejected(f"{text}; fix: publish it with --accept-change if the difference is intended")
        notes.append(f"accepted difference: {text}")
    return greatest


def check_finite(outputs: Arrays, sample: str) -> None:
    """Check that all numbers are finite.

    Raises:
        Rejected: an output has NaN or infinity.
    """
    for name, array in outputs.items():
        if array.dtype.kind == "f" and (bad := int((~np.isfinite(array)).sum())):
            raise Rejected(
                f"output '{name}' on {sample}: expected finite numbers, got NaN or infinity in "
                f"{bad:,} of {array.size:,} values"
            )
