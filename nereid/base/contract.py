"""The wire contract: names, limits and message texts shared by the server, its clients and the gateway.

docs/contract.md describes them for users. This module imports nothing from the package.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# The input of every task, and the output of an image classifier.
IMAGE, SCORES = "image", "scores"
# Outputs of a model that reads text: one entry per line, in reading order. `box` is [-1, 4, 2], its corners.
TEXT, CONFIDENCE, BOX = "text", "confidence", "box"
# Additional output of a model that reads document fields: one JSON object per field.
FIELD = "field"
# Additional outputs of a model that reads barcodes: one entry per barcode. `barcode_box` is [-1, 4, 2].
BARCODE, SYMBOLOGY, BARCODE_BOX = BARCODE_OUTPUTS = "barcode", "symbology", "barcode_box"
# Additional outputs of a model that reads multi-page files: the page number, from 1, of each line and of
# each barcode; and each page's width and height in pixels, [-1, 2].
PAGE, BARCODE_PAGE, PAGE_SIZE = PAGE_OUTPUTS = "page", "barcode_page", "page_size"
# Outputs of an object detector, with `box` [-1, 4]: left, top, right, bottom. One entry per object.
SCORE, LABEL = "score", "label"
# Output of a model that computes embeddings: one vector per image.
EMBEDDING = "embedding"
# Maximum text lines and objects per image; the least confident are dropped. A reader's `max_lines` may be
# lower: it rejects images with more lines.
MAX_LINES, MAX_OBJECTS = 1000, 300
# Additional outputs of a route: which variant responded, and why it was chosen.
VARIANT, VERSION, REASON = ROUTE_OUTPUTS = "variant", "version", "route_reason"

# NumPy's name of each v2 datatype whose elements have a fixed size; it has none for BF16.
# Source: docs/protocol of triton-inference-server/server.
DTYPES = {"BOOL": "b1", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8"} | {
    f"{sign}INT{8 * size}": f"<{kind}{size}"
    for sign, kind in (("", "i"), ("U", "u"))
    for size in (1, 2, 4, 8)
}

VARIANT_HEADER, VERSION_HEADER, ROUTE_KEY_HEADER = "x-variant", "x-model-version", "x-route-key"
# Request options, by their names in clients and in the gateway's query string.
OPTION_HEADERS = {"variant": VARIANT_HEADER, "version": VERSION_HEADER, "route_key": ROUTE_KEY_HEADER}
# Headers read by a route's rules.
ROUTE_HEADER_PREFIX = "x-route-"
# Triton forwards only the headers that our backends read; other `x-` headers may carry API keys.
ROUTE_HEADERS = "(?i)^x-(variant|model-version|route-[a-z0-9-]+)$"
FORWARDED_HEADERS = "(?i)^(x-(variant|model-version|route-[a-z0-9-]+)|traceparent|nereid-probe)$"
# W3C trace context, as a header or as a parameter between models; and its time of sending, in ns since 1970.
TRACE_PARAMETER, SENT_PARAMETER = "traceparent", "nereid_sent_ns"
# Marks a health check or warm-up, which does not count as traffic. The gateway never forwards a caller's.
PROBE_HEADER = "nereid-probe"
# Parameters that only our own processes may send.
RESERVED_PARAMETERS = frozenset({TRACE_PARAMETER, SENT_PARAMETER, PROBE_HEADER})
# Grants access to the restricted APIs. Over gRPC, Triton expects the name with its own prefix.
TOKEN_HEADER = "nereid-token"
# A gateway caller's API key.
KEY_HEADER = "x-api-key"
GRPC_TOKEN_HEADER = f"triton-grpc-protocol-{TOKEN_HEADER}"
# Request parameter: a time from time.monotonic_ns, a clock that all processes on a machine share.
DEADLINE_PARAMETER = "deadline_monotonic_ns"

HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002
MAX_IMAGE_BYTES = 32 * 2**20

# Prefixes of the server's own error messages, because BLS and ensembles pass on only an error's text.
INVALID_REQUEST_PREFIX = "invalid request: "
INVALID_IMAGE_PREFIX = "invalid image: "
INFERENCE_FAILED_PREFIX = "inference failed: "
OVERLOADED_PREFIX = "overloaded: "
DEADLINE_EXCEEDED_PREFIX = "deadline exceeded: "
UNAVAILABLE_PREFIX = "unavailable: "
CANCELLED_PREFIX = "cancelled: "
# Follows `UNAVAILABLE_PREFIX`: an instance's device, such as its GPU, failed.
DEVICE_FAILED = "device failed: "

# Triton's own messages. Source: core and python_backend r24.10; each was observed.
QUEUE_FULL_TEXT = "Exceeds maximum queue size"
QUEUE_TIMEOUT_TEXT = "Request timeout expired"
NOT_HEALTHY_TEXT = "is not healthy"
NOT_READY_TEXT = "is not ready"
# The message continues with a region name, which helps an attacker (CVE-2025-23320).
SHARED_MEMORY_FULL_TEXT = "Failed to increase the shared memory pool size"
SHARED_MEMORY_FULL = "the memory that the server's processes share is full"
RESTRICTED_TEXT = "is restricted"
# What these texts mean, anywhere in a message: an ensemble inserts its own text before them.
CODES_BY_TEXT: Mapping[str, str] = {
    INVALID_REQUEST_PREFIX: "invalid_request",
    INVALID_IMAGE_PREFIX: "invalid_image",
    INFERENCE_FAILED_PREFIX: "inference_failed",
    OVERLOADED_PREFIX: "overloaded",
    DEADLINE_EXCEEDED_PREFIX: "deadline_exceeded",
    UNAVAILABLE_PREFIX: "unavailable",
    CANCELLED_PREFIX: "cancelled",
    QUEUE_FULL_TEXT: "overloaded",
    QUEUE_TIMEOUT_TEXT: "deadline_exceeded",
    SHARED_MEMORY_FULL_TEXT: "overloaded",
    NOT_HEALTHY_TEXT: "stub_died",
    NOT_READY_TEXT: "unavailable",
}
# A server log line that the supervisor reads.
_FAILED_DEVICE = re.compile(rf'"?{DEVICE_FAILED}process (\d+) of ')
_UNHEALTHY = re.compile(r"Stub process '([^']+)' is not healthy")
_BATCH_LIMIT = re.compile(r"batch-size must be <= (\d+)")

_BAD_IMAGES = re.compile(r"(\d+) of (\d+) images cannot be used: (.*)", re.DOTALL)
_EACH_IMAGE = re.compile(r"(?:^|; )image (\d+): ")


@dataclass(frozen=True, slots=True)
class BadImages:
    """The invalid images listed in the error of a rejected request.

    Attributes:
        prefix: the text before the list: Triton's own, then the error's prefix.
        reasons: why each image was rejected, by its index in the request; empty if the list does not match
            the request.
    """

    prefix: str
    reasons: dict[int, str]


def format_bad_images(reasons: Mapping[int, str], count: int) -> str:
    """Return the error message for a request with bad images; the inverse of `read_bad_images`.

    Args:
        reasons: why each image was rejected, by its index in the request.
        count: images in the request.
    """
    listed = "; ".join(f"image {index}: {reason}" for index, reason in reasons.items())
    return f"{len(reasons)} of {count} images cannot be used: {listed}"


def read_bad_images(text: str, count: int) -> BadImages | None:
    """Read the list written by `format_bad_images` from an error's text, or return None if it has no list.

    Args:
        text: the message, possibly with a prefix.
        count: images in the request.
    """
    match = _BAD_IMAGES.search(text)
    if not match:
        return None
    _, *pairs = _EACH_IMAGE.split(match[3])
    reasons = {int(index): reason for index, reason in zip(pairs[::2], pairs[1::2], strict=True)}
    is_complete = int(match[1]) == len(reasons) == len(pairs) // 2 and int(match[2]) == count
    fits = is_complete and max(reasons, default=count) < count
    return BadImages(text[: match.start()], reasons if fits else {})


def read_batch_limit(text: str) -> int | None:
    """Read the batch limit from Triton's rejection of a larger batch; None if the text names no limit."""
    match = _BATCH_LIMIT.search(text)
    return int(match[1]) if match else None


def read_unhealthy_instance(text: str) -> str:
    """Return the instance that Triton's message reports as unhealthy; empty for other messages."""
    match = _UNHEALTHY.search(text)
    return match[1] if match else ""


def format_failed_device(pid: int, model: str, reason: str) -> str:
    """Return the log line with which a process of `model` reports that its device failed."""
    return f"{DEVICE_FAILED}process {pid} of {model} must be replaced: {reason}"


def read_failed_device(line: str) -> int | None:
    """Return the pid in a line from `format_failed_device`, possibly quoted; None for other lines."""
    match = _FAILED_DEVICE.match(line)
    return int(match[1]) if match else None
