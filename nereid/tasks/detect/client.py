"""Detection of objects on a Triton server, blocking and from asyncio."""

from nereid.client.model_client import AsyncModelClient, ModelClient
from nereid.tasks.detect.result import DETECTIONS, Detection


class Detector(ModelClient[Detection]):
    """A connection to one model that finds objects; arguments, retries and errors as of `Classifier`.

    Args:
        model: a route, or any model with an input `image` and the outputs `box`, `score` and `label`; default
            `detect`.

    Example:
        >>> with Detector("localhost:8001") as detector:
        ...     detector.detect("street.jpg").objects[0].label
        'car'
    """

    kind = DETECTIONS
    detect = ModelClient[Detection].infer
    """Find the objects of one image; arguments and errors as `Classifier.classify`."""
    detect_many = ModelClient[Detection].infer_many
    """Find the objects of a stream of images, several at a time; see `Classifier.classify_many`.

    Each image has its own request, because images differ in their number of objects.
    """


class AsyncDetector(AsyncModelClient[Detection]):
    """`Detector` for asyncio: the same arguments, results and errors."""

    kind = DETECTIONS
    detect = AsyncModelClient[Detection].infer
    """Find the objects of one image; see `Detector.detect`."""
    detect_many = AsyncModelClient[Detection].infer_many
    """Find the objects of a stream of images; see `Detector.detect_many`."""
