"""Reading of text on a Triton server, blocking and from asyncio."""

from nereid.client.model_client import AsyncModelClient, ModelClient
from nereid.tasks.read.result import READINGS, Reading


class Reader(ModelClient[Reading]):
    """A connection to one model that reads text; arguments, retries and errors as of `Classifier`.

    Args:
        model: a route, or any model with an input `image` and the outputs `text`, `confidence` and `box`;
            default `read_text`.

    Example:
        >>> with Reader("localhost:8001") as reader:
        ...     reader.read("label.jpg").lines[12].text
        'RB 123 456 785 GB'
    """

    kind = READINGS
    read = ModelClient[Reading].infer
    """Read the text of one image; arguments and errors as `Classifier.classify`."""
    read_many = ModelClient[Reading].infer_many
    """Read the text of a stream of images, several at a time; see `Classifier.classify_many`.

    Each image has its own request, because images differ in their number of lines.
    """


class AsyncReader(AsyncModelClient[Reading]):
    """`Reader` for asyncio: the same arguments, results and errors."""

    kind = READINGS
    read = AsyncModelClient[Reading].infer
    """Read the text of one image; see `Reader.read`."""
    read_many = AsyncModelClient[Reading].infer_many
    """Read the text of a stream of images; see `Reader.read_many`."""
