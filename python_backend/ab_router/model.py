"""Triton adapter of the `ab_router` backend: hands each request to a variant and answers when that has."""

import asyncio
import random
import threading
from dataclasses import dataclass

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend import errors, routing
from python_backend.model_config import ModelConfig
from python_backend.triton_io import answer, fail, read_parameters


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """`variants`: JSON list of {name, model, version, weight}."""

    variants: str


class TritonPythonModel:
    """One public name in front of several pinned models."""

    def initialize(self, args):
        """Read the route; a wrong one fails the load."""
        config = ModelConfig.from_args(args)
        settings = config.settings(RouteSettings)
        self.variants = routing.parse_variants(settings.variants, config.pinned_network_version)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def execute(self, requests):
        """Start every request and return at once: they overlap, and each answers through its own sender."""
        for request in requests:
            asyncio.run_coroutine_threadsafe(self.serve(request), self.loop)

    async def serve(self, request):
        """Answer one request, whatever happens to it."""
        try:
            response = await self.forward(request)
        except Exception as error:
            response = fail(errors.from_exception(error))
        try:
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:
            pb_utils.Logger.log_error(f"the answer of request '{request.request_id()}' was lost: {error}")

    async def forward(self, request):
        """Call the chosen variant with the request's own image tensor: no byte is copied in Python."""
        choice = routing.choose(self.variants, read_parameters(request), random.random())
        call = pb_utils.InferenceRequest(
            model_name=choice.variant.model,
            model_version=choice.variant.version,
            request_id=request.request_id(),
            inputs=[pb_utils.get_input_tensor_by_name(request, "image")],
            requested_output_names=["scores"],
        )
        response = await call.async_exec()
        if response.has_error():
            raise errors.from_message(response.error().message())
        scores = pb_utils.get_output_tensor_by_name(response, "scores").as_numpy()
        told = (choice.variant.name, choice.variant.network_version, choice.reason)
        variant, version, route_reason = (np.full((len(scores), 1), word.encode(), object) for word in told)
        return answer(scores=scores, variant=variant, version=version, route_reason=route_reason)

    def finalize(self):
        """Stop the loop; Triton has no request in flight any more."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
