"""The first run of a network: what it returns for photos, and whether it computes batches."""

from collections.abc import Sequence

import numpy as np

from nereid.publish.examination.examine import ExaminationRequest, Rejected, Survey
from nereid.publish.examination.file_checks import Progress, check_file, served_config
from nereid.publish.examination.measurements import Network
from nereid.publish.examination.output_meaning import Answers
from nereid.publish.examination.outputs import answers_of, check_finite
from nereid.publish.examination.samples import Sample
from nereid.repository import onnx_graph


def survey(request: ExaminationRequest, progress: Progress) -> Survey:
    """Run a network on images.

    Raises:
        Rejected, InvalidOnnx, InvalidConfig: it cannot be opened or run.
    """
    file, _ = check_file(request, progress)
    config = served_config(request, file.signature)
    progress("running it for the first time")
    network = Network("the network", config, request.candidate)
    answers = answers_of(request)
    samples = answers.samples(config)
    outputs = [network.run(sample) for sample in samples]
    for sample, arrays in zip(samples, outputs, strict=True):
        check_finite(arrays, sample.name)
    is_single = any(node.name == onnx_graph.FIRST_IMAGE for node in onnx_graph.nodes(file.model))
    can_batch = not is_single and _can_batch(network, answers, samples)
    return answers.first_run(file, samples, outputs, can_batch)


def _can_batch(network: Network, answers: Answers, samples: Sequence[Sample]) -> bool:
    """Return whether two rows together get the outputs that they get alone."""
    pair = answers.pair(samples)
    (name,) = pair[0].inputs
    batch = {name: np.concatenate([each.inputs[name] for each in pair])}
    try:
        found = network.run(Sample("a batch of two", batch))
    except Rejected:
        return False
    if any(array.shape[:1] != (len(pair),) for array in found.values()):
        return False
    rows = [{key: array[place : place + 1] for key, array in found.items()} for place in range(len(pair))]
    return answers.is_same([network.run(each) for each in pair], rows)
