"""The wire contract: names, limits and texts that the server, its clients and the gateway must share.

docs/contract.md describes them for users. This module imports nothing of the package.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# The input of every task, and the output of a model that classifies images.
IMAGE, SCORES = "image", "scores"
# Outputs of a model that reads text: one entry per line, in reading order. `box` is [-1, 4, 2], its corners.
TEXT, CONFIDENCE, BOX = "text", "confidence", "box"
# Further output of a model that reads fields of a document: one JSON object per field.
FIELD = "field"
# Further outputs of a model that reads barcodes: one entry per barcode. `barcode_box` is [-1, 4, 2].
BARCODE, SYMBOLOGY, BARCODE_BOX = BARCODE_OUTPUTS = "barcode", "symbology", "barcode_box"
# Further outputs of a model that reads files with several pages: the page of each line, and of each barcode,
# from 1; and [-1, 2], width and height of each page in pixels.
PAGE, BARCODE_PAGE, PAGE_SIZE = PAGE_OUTPUTS = "page", "barcode_page", "page_size"
# Outputs of a model that finds objects, with `box` [-1, 4]: left, top, right, bottom. One entry per object.
SCORE, LABEL = "score", "label"
# Output of a model that computes embeddings: one vector per image.
EMBEDDING = "embedding"
# Most lines of text, and most objects, of one image; those with the least confidence are left out.
MAX_LINES, MAX_OBJECTS = 1000, 300
# Further outputs of a route: which variant responded, and why it was chosen.
VARIANT, VERSION, REASON = ROUTE_OUTPUTS = "variant", "version", "route_reason"

VARIANT_HEADER, VERSION_HEADER, ROUTE_KEY_HEADER = "x-variant", "x-model-version", "x-route-key"
# Options of a request by their names in clients and in the gateway's query.
OPTION_HEADERS = {"variant": VARIANT_HEADER, "version": VERSION_HEADER, "route_key": ROUTE_KEY_HEADER}
# Headers that the rules of a route read.
ROUTE_HEADER_PREFIX = "x-route-"
# Triton forwards exactly the headers that our backends read: other `x-` headers may carry API keys.
ROUTE_HEADERS = "(?i)^x-(variant|model-version|route-[a-z0-9-]+)$"
FORWARDED_HEADERS = "(?i)^(x-(variant|model-version|route-[a-z0-9-]+)|traceparent|nereid-probe)$"
# W3C trace context, as a header or as a parameter between models; and when they sent it, in ns since 1970.
TRACE_PARAMETER, SENT_PARAMETER = "traceparent", "nereid_sent_ns"
# Marks a health check or a warm-up, which is not traffic. The gateway does not forward it for callers.
PROBE_HEADER = "nereid-probe"
# Only our own processes send these parameters.
RESERVED_PARAMETERS = frozenset({TRACE_PARAMETER, SENT_PARAMETER, PROBE_HEADER})
# Opens the restricted APIs. Over gRPC, Triton expects its own prefix before the name.
TOKEN_HEADER = "nereid-token"
# The key of a gateway's caller.
KEY_HEADER = "x-api-key"
GRPC_TOKEN_HEADER = f"triton-grpc-protocol-{TOKEN_HEADER}"
# Request parameter: a time of time.monotonic_ns, which all processes of a machine share.
DEADLINE_PARAMETER = "deadline_monotonic_ns"

HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002
MAX_IMAGE_BYTES = 32 * 2**20

# First words of the server's own errors. BLS and an ensemble pass on only the text of an error.
INVALID_REQUEST_PREFIX = "invalid request: "
INVALID_IMAGE_PREFIX = "invalid image: "
INFERENCE_FAILED_PREFIX = "inference failed: "
OVERLOADED_PREFIX = "overloaded: "
DEADLINE_EXCEEDED_PREFIX = "deadline exceeded: "
UNAVAILABLE_PREFIX = "unavailable: "
CANCELLED_PREFIX = "cancelled: "
# After `UNAVAILABLE_PREFIX`: the device of one instance, such as a GPU, failed.
DEVICE_FAILED = "device failed: "

# Triton's own texts. Source: core and python_backend r24.10; each was seen.
QUEUE_FULL_TEXT = "Exceeds maximum queue size"
QUEUE_TIMEOUT_TEXT = "Request timeout expired"
NOT_HEALTHY_TEXT = "is not healthy"
NOT_READY_TEXT = "is not ready"
# It goes on with the name of a region, which helps to attack a server (CVE-2025-23320).
SHARED_MEMORY_FULL_TEXT = "Failed to increase the shared memory pool size"
SHARED_MEMORY_FULL = "the memory that the server's processes share is full"
RESTRICTED_TEXT = "is restricted"
# A line of the server's log, which its supervisor reads.
_FAILED_DEVICE = re.compile(rf'"?{DEVICE_FAILED}process (\d+) of ')
_UNHEALTHY = re.compile(r"Stub process '([^']+)' is not healthy")
_BATCH_LIMIT = re.compile(r"batch-size must be <= (\d+)")

_BAD_IMAGES = re.compile(r"(\d+) of (\d+) images cannot be used: (.*)", re.DOTALL)
_EACH_IMAGE = re.compile(r"(?:^|; )image (\d+): ")


@dataclass(frozen=True, slots=True)
class BadImages:
    """The images that a rejected request should not contain.

    Attributes:
        prefix: the text before the list: Triton's own, then the prefix of the error.
        reasons: why each image was rejected, by its index in the request; empty if the list does not fit
            the request.
    """

    prefix: str
    reasons: dict[int, str]


def format_bad_images(reasons: Mapping[int, str], count: int) -> str:
    """Return the message of a request with bad images; `read_bad_images` is its inverse.

    Args:
        reasons: why each image was rejected, by its index in the request.
        count: images in the request.
    """
    listed = "; ".join(f"image {index}: {reason}" for index, reason in reasons.items())
    return f"{len(reasons)} of {count} images cannot be used: {listed}"


def read_bad_images(text: str, count: int) -> BadImages | None:
    """Read the list of `format_bad_images` from an error's text; None if the text has none.

    Args:
        text: the message, perhaps after a prefix.
        count: images in the request.
    """
    found = _BAD_IMAGES.search(text)
    if not found:
        return None
    _, *pairs = _EACH_IMAGE.split(found[3])
    reasons = {int(index): reason for index, reason in zip(pairs[::2], pairs[1::2], strict=True)}
    is_complete = int(found[1]) == len(reasons) == len(pairs) // 2 and int(found[2]) == count
    fits = is_complete and max(reasons, default=count) < count
    return BadImages(text[: found.start()], reasons if fits else {})


def read_batch_limit(text: str) -> int | None:
    """Read the largest batch from Triton's rejection of a larger one; None if the text has no limit."""
    found = _BATCH_LIMIT.search(text)
    return int(found[1]) if found else None


def read_unhealthy_instance(text: str) -> str:
    """Return the instance that Triton's message calls unhealthy; empty for other messages."""
    found = _UNHEALTHY.search(text)
    return found[1] if found else ""


def format_failed_device(pid: int, model: str, reason: str) -> str:
    """Return the line of the log by which a process of `model` reports that its device failed."""
    return f"{DEVICE_FAILED}process {pid} of {model} must be replaced: {reason}"


def read_failed_device(line: str) -> int | None:
    """Return the process in a line of `format_failed_device`, perhaps quoted; None for other lines."""
    found = _FAILED_DEVICE.match(line)
    return int(found[1]) if found else None
