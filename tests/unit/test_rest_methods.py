"""Requests over HTTP, compared with those of tritonclient."""

import json

import numpy as np
import pytest
import tritonclient.http

from nereid.client.request import check_options, image_tensor, region_tensor
from nereid.client.rest import LENGTH, Request, RestMethods

FILES = [b"one", b"", b"three"]


class Recorded(RestMethods):
    def _send(self, request: Request) -> Request:
        return request


def reference(tensor):
    outputs = [
        tritonclient.http.InferRequestedOutput("scores", class_count=3),
        tritonclient.http.InferRequestedOutput("variant"),
    ]
    client = tritonclient.http.InferenceServerClient
    return client.generate_request_body([tensor], outputs, request_id="7", timeout=2_000_000)


@pytest.mark.parametrize("memory", ["sent", "shared"])
def test_request_is_that_of_tritonclient(memory):
    theirs = tritonclient.http.InferInput("image", [len(FILES), 1], "BYTES")
    if memory == "sent":
        ours = image_tensor("http", FILES)
        theirs.set_data_from_numpy(np.array(FILES, dtype=object).reshape(-1, 1))
    else:
        ours = region_tensor("http", len(FILES), "r", 20)
        theirs.set_shared_memory("r", 20)
    options = check_options({"top_k": 3, "request_id": "7"}, 30.0)

    arguments = options.infer_arguments("http", ours, ["scores", "variant"], "scores", 2.0)
    sent = Recorded().infer("m", **arguments)

    body, json_size = reference(theirs)
    head = int(sent.headers.get(LENGTH, len(b"".join(sent.body))))
    assert (LENGTH in sent.headers) == (json_size is not None)
    assert json.loads(b"".join(sent.body)[:head]) == json.loads(body[:json_size])
    assert b"".join(sent.body)[head:] == body[json_size or len(body) :]
