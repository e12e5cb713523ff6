"""Ask a server to classify the sample photo, and look for espresso in what it says.

    python3 healthcheck.py [--url http://127.0.0.1:8000] [--model classify] [--label espresso] [--timeout-s 5]
    python3 healthcheck.py --page http://127.0.0.1:8080/readyz

Exit code 0 if it is there; else 1, and the reason on stderr. A page is only asked for its status. Triton
24.10 says 200 at /v2/health/ready also when the process of a model is dead. A model that is full is well: who
restarted it would lose what it has begun. Needs the standard library only.
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
FULL = '{"error":"overloaded: '
# So much of a refusal is told.
TOLD = 300


class Unhealthy(Exception):
    """What was expected did not come; the message says what came instead."""


def ask(
    url: str, timeout_s: float, body: bytes | None = None, headers: dict[str, str] | None = None
) -> bytes:
    """Return the body of an answer with status 200; no proxy of the environment is asked instead.

    Raises:
        Unhealthy: another status, or no answer.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, body, headers or {}), timeout=timeout_s) as answer:
            said: bytes = answer.read()
            return said
    except urllib.error.HTTPError as refused:
        with refused:
            reason = refused.read(TOLD).decode(errors="replace")
        raise Unhealthy(f"{url} says {refused.code}: {reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unhealthy(f"{url}: {error}") from None


def best_label(url: str, model: str, image: bytes, timeout_s: float) -> str:
    """Return the class that a model finds in an image, by Triton's classification extension over HTTP.

    Raises:
        Unhealthy: no answer, or one without a class.
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
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    said = ask(f"{url.rstrip('/')}/v2/models/{model}/infer", timeout_s, head + element, headers)
    try:
        (scores,) = (each for each in json.loads(said)["outputs"] if each["name"] == "scores")
        return str(scores["data"][0]).split(":", 2)[2]  # SCORE:INDEX:LABEL
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Unhealthy(f"no class in the answer: {said[:TOLD].decode(errors='replace')}") from None


def check(args: argparse.Namespace) -> None:
    """Do what the command line asks for.

    Raises:
        Unhealthy: something else came than should.
    """
    if args.page:
        ask(args.page, args.timeout_s)
        return
    try:
        found = best_label(args.url, args.model, args.image.read_bytes(), args.timeout_s)
    except Unhealthy as reason:
        if FULL in str(reason):
            return
        raise
    if found != args.label:
        raise Unhealthy(f"expected '{args.label}', '{args.model}' found '{found}'")


def main(words: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, over HTTP")
    parser.add_argument("--model", default="classify", help="that is asked")
    parser.add_argument("--image", type=Path, default=PHOTO, help="that is sent")
    parser.add_argument("--label", default="espresso", help="of the class that the image shows")
    parser.add_argument("--page", default="", help="ask for this page only")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="for the answer to come")
    try:
        check(parser.parse_args(words))
    except (Unhealthy, OSError) as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
