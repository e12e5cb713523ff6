"""Check a server by classifying the sample photo: the best class must be espresso.

    python3 healthcheck.py [--url http://127.0.0.1:8000] [--model classify] [--label espresso] [--timeout-s 5]
    python3 healthcheck.py --page http://127.0.0.1:8080/readyz

Exit code 0 on success; otherwise 1, with the reason on stderr. With --page only the status of the page
counts. Triton's own /v2/health/ready is not enough: in 24.10 it returns 200 even if the process of a model is
dead. An overloaded model is healthy: a restart would lose the requests that it has begun. Needs only the
standard library.
"""

import argparse
import http.client
import json
import struct
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

PHOTO = Path(__file__).resolve().parent.parent / "clients" / "samples" / "coffee.jpg"
# The server does not count this request as traffic.
PROBE = "nereid-probe"
OVERLOADED = '{"error":"overloaded: '
# Maximum length of an error response in a message.
MAX_REASON_BYTES = 300


class Unhealthy(Exception):
    """The check failed; the message has the reason."""


def fetch(
    url: str, timeout_s: float, body: bytes | None = None, headers: dict[str, str] | None = None
) -> bytes:
    """Return the body of a response with status 200; ignore proxies of the environment.

    Raises:
        Unhealthy: another status, or no response.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, body, headers or {}), timeout=timeout_s) as response:
            body_read: bytes = response.read()
            return body_read
    except urllib.error.HTTPError as refusal:
        with refusal:
            reason = refusal.read(MAX_REASON_BYTES).decode(errors="replace")
        raise Unhealthy(f"{url} returned {refusal.code}: {reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unhealthy(f"{url}: {error}") from None


def best_label(url: str, model: str, image: bytes, timeout_s: float) -> str:
    """Return the best class of an image, with Triton's classification extension over HTTP.

    Raises:
        Unhealthy: no response, or a response without a class.
    """
    element = struct.pack("<I", len(image)) + image  # a BYTES tensor is its elements, each after its length
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "image",
                    "shape": [1, 1],
                    "datatype": "BYTES",
                    "parameters": {"binary_data_size": len(element)},
                }
            ],
            "outputs": [{"name": "scores", "parameters": {"classification": 1}}],
        }
    ).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
        PROBE: "1",
    }
    response = fetch(f"{url.rstrip('/')}/v2/models/{model}/infer", timeout_s, head + element, headers)
    try:
        (scores,) = (each for each in json.loads(response)["outputs"] if each["name"] == "scores")
        return str(scores["data"][0]).split(":", 2)[2]  # SCORE:INDEX:LABEL
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Unhealthy(
            f"no class in the response: {response[:MAX_REASON_BYTES].decode(errors='replace')}"
        ) from None


def check(args: argparse.Namespace) -> None:
    """Run the check that the command line selects.

    Raises:
        Unhealthy: the check failed.
    """
    if args.page:
        fetch(args.page, args.timeout_s)
        return
    try:
        found = best_label(args.url, args.model, args.image.read_bytes(), args.timeout_s)
    except Unhealthy as reason:
        if OVERLOADED in str(reason):
            return
        raise
    if found != args.label:
        raise Unhealthy(f"'{args.model}': expected the class '{args.label}', got '{found}'")


def main(words: Sequence[str] | None = None) -> int:
    """Run the check and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="HTTP address of the server")
    parser.add_argument("--model", default="classify", help="model that classifies the image")
    parser.add_argument("--image", type=Path, default=PHOTO, help="image file to send")
    parser.add_argument("--label", default="espresso", help="expected class of the image")
    parser.add_argument("--page", default="", help="check only the status of this page")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="time limit of the response, in seconds")
    try:
        check(parser.parse_args(words))
    except (Unhealthy, OSError) as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
