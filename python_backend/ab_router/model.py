"""Triton adapter of the `ab_router` backend: each request in a thread, which answers when the variant has."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import triton_python_backend_utils as pb_utils

from nereid import serving_errors as errors
from nereid.config.model_config import ModelConfig
from nereid.routing import deadline
from nereid.routing.assignment import MOST_CALLS
from nereid.routing.route_file import TOLD, RouteWatch
from nereid.routing.router import Router
from nereid.triton import inherited_sockets
from nereid.triton.metrics import ROUTE_METRICS, ROUTE_PREFIX
from nereid.triton.tensors import Metrics, fail, log_info, log_warn, read_parameters

EXPIRE_S, POLL_EVERY = 0.05, 5


class TritonPythonModel:
    """One public name in front of several pinned models."""

    def initialize(self, args):
        """Read the route; a wrong one fails the load."""
        inherited_sockets.close_connections()
        self.config = ModelConfig.from_args(args)
        self.outputs = [output.name for output in self.config.outputs if output.name not in TOLD]
        self.watch = RouteWatch(
            self.config, lambda model, version: pb_utils.is_model_ready(model, str(version))
        )
        instance = args["model_instance_name"]
        self.metrics = Metrics(ROUTE_PREFIX, ROUTE_METRICS, route=self.config.name, model_instance=instance)
        self.router = Router(self.watch.table, self.metrics, self.warn)
        self.show(self.watch.table)
        self.pool = ThreadPoolExecutor(MOST_CALLS)
        self.is_closing = threading.Event()
        self.keeper = threading.Thread(target=self.keep, daemon=True)
        self.keeper.start()

    def execute(self, requests):
        """Start every request and return at once: they overlap, and each answers through its own sender."""
        for request in requests:
            if ticket := self.router.admit(Exchange(request, self.outputs, self.config.max_batch_size > 0)):
                self.pool.submit(self.handle, ticket)

    def handle(self, ticket):
        """Answer one request, whatever happens to it."""
        try:
            self.router.handle(ticket)
        except Exception as error:
            self.warn(f"the answer of request '{ticket.exchange.request.request_id()}' was lost: {error!r}")

    def keep(self):
        """Refuse what is late, and take a new route when its file changes."""
        for tick in itertools.count():
            if self.is_closing.wait(EXPIRE_S):
                return
            try:
                self.router.expire()
            except Exception as error:
                self.warn(f"the answer of a late request was lost: {error!r}")
            if tick % POLL_EVERY == 0:
                self.poll()

    def poll(self):
        """Look at the route file; a wrong one changes nothing."""
        try:
            table = self.watch.poll()
        except Exception as error:
            self.metrics.add("reloads_total", outcome="refused")
            self.warn(f"generation {self.generation} stays, {self.watch.path.name} is refused: {error}")
            return
        if table:
            self.router.use(table)
            self.metrics.add("reloads_total", outcome="accepted")
            self.show(table)

    def show(self, table):
        """Tell which route is in use."""
        self.metrics.set("generation", table.route.generation)
        self.metrics.set_only("served_since_seconds", time.time(), sha256=table.sha256)
        self.generation = table.route.generation
        weights = ", ".join(f"{variant.name} {variant.weight:g}" for variant in table.route.variants)
        log_info(f"route {self.config.name}: generation {self.generation}, weights {weights}")

    def warn(self, line):
        """Write a warning to Triton's log."""
        log_warn(f"route {self.config.name}: {line}")

    def finalize(self):
        """Wait for what is still being mirrored; Triton has no request in flight any more."""
        self.is_closing.set()
        self.keeper.join()
        self.pool.shutdown()
        self.metrics.close()


class Exchange:
    """One request of Triton's, as the router sees it: see `nereid.routing.attempts`."""

    def __init__(self, request, outputs, is_batched):
        self.request, self.outputs, self.is_batched = request, outputs, is_batched
        self.timeout_s = request.timeout() / 1e6

    def parameters(self):
        """Return the request's parameters; forwarded headers are among them."""
        return read_parameters(self.request)

    def is_cancelled(self):
        """Ask Triton, which takes a round trip."""
        return self.request.is_cancelled()

    def call(self, model, version, timeout_s):
        """Pass on the request's own input tensors: no byte is copied in Python."""
        # Without the request's trace: handing that on ends Triton 24.10 with a SIGSEGV when tracing is on.
        request_id = self.request.request_id()
        response = pb_utils.InferenceRequest(
            model_name=model,
            model_version=version,
            request_id=request_id,
            inputs=self.request.inputs(),
            requested_output_names=self.outputs,
            # The one for a queue whose policy looks at it, the other for our own backends.
            timeout=int(timeout_s * 1e6),
            parameters=deadline.within(timeout_s),
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            # The client has chosen its id, which must not be taken for the error's class.
            raise errors.from_message(response.error().message().replace(f"[request id: {request_id}] ", ""))
        return response

    def scores(self, response):
        """Return a response's first output."""
        return pb_utils.get_output_tensor_by_name(response, self.outputs[0]).as_numpy()

    def answer(self, response, variant, version, reason):
        """Send the response's own tensors, and who gave them."""
        wanted, given = self.request.requested_output_names(), response.output_tensors()
        tensors = [tensor for tensor in given if tensor.name() in wanted]
        shape = (given[0].shape()[0], 1) if self.is_batched else (1,)
        told = zip(TOLD, (variant, version, reason), strict=True)
        tensors += [tell(name, word, shape) for name, word in told if name in wanted]
        self.send(pb_utils.InferenceResponse(tensors))

    def refuse(self, error):
        """Send an error."""
        self.send(fail(error))

    def send(self, response):
        """Hand the answer to Triton, which waits for it."""
        self.request.get_response_sender().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


@lru_cache(256)
def tell(name, word, shape):
    """Return a tensor that says the same word for every image."""
    return pb_utils.Tensor(name, np.full(shape, word.encode(), object))
