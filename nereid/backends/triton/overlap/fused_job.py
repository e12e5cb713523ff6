"""A batch of a `fused` model on a GPU, from the images of its requests to their outcomes."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from nereid.backends.triton.model_trace import BatchTrace
from nereid.backends.triton.overlap.lanes import Lanes, Stages
from nereid.backends.triton.steps.after_network import AfterNetwork, Images, Outcome
from nereid.base.serving_errors import ServingError, from_exception
from nereid.vision.imaging.image_times import ImageTimes
from nereid.vision.imaging.pipeline import Batch, by_request, images_of


class FusedJob:
    """The requests of one `execute`.

    Args:
        requests: images or error of each request.
        ran: receives the seconds and rows of the network's run.
    """

    def __init__(
        self,
        requests: Sequence[Images],
        after: AfterNetwork,
        trace: BatchTrace | None,
        ran: Callable[[float, int], None],
    ) -> None:
        self.images = images_of(requests)
        self._requests, self._after, self._trace, self._ran = requests, after, trace, ran
        self._errors: Sequence[ServingError | None] = [None] * len(self.images)
        self._times: Sequence[ImageTimes] = ()

    def prepared(self, errors: Sequence[ServingError | None], times: Sequence[ImageTimes]) -> None:
        """Take the error and the times of each image."""
        self._errors, self._times = errors, times

    def outcomes(
        self, outputs: Mapping[str, np.ndarray] | ServingError, stages: Stages | None
    ) -> list[Outcome]:
        """Return the outcome of each request.

        Args:
            outputs: rows of all images by name; empty if nothing was computed. Or the error of the batch.
        """
        good = sum(error is None for error in self._errors)
        if stages:
            self._ran((stages.computed_ns - stages.begun_ns) / 1e9, good)
        for image in self._times:
            image.end(*stages[:2]) if stages else image.end()
        rows, times = by_request(self._requests, self._errors, self._times)
        if self._trace:
            self._trace.prepared(times)
            if stages:
                self._trace.ran(stages.begun_ns, good, stages.computed_ns)
        if isinstance(outputs, ServingError):
            return [outputs if isinstance(each, slice) else each for each in rows]
        if not outputs:
            return [each if isinstance(each, ServingError) else {} for each in rows]
        return self._after.finish(Batch(None, rows, times), self._requests, outputs)

    def run(self, lanes: Lanes) -> tuple[Mapping[str, np.ndarray] | ServingError, Stages | None]:
        """Decode and compute the batch alone, in the first slot; returns what `outcomes` takes."""
        try:
            if not self.images:
                return {}, None
            errors, times = lanes.decode(0, self.images)
            self.prepared(errors, times)
            if all(errors):
                return {}, None
            lanes.compute(0, len(errors))
            found = lanes.wait(0)
            lanes.release()
            return found
        except Exception as error:  # an exception that leaves `execute` fails the requests with other errors
            return from_exception(error), None
