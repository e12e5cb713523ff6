"""The same service by hand, as a good engineer writes it in an afternoon: the peer of the benchmark.

It has the library's own decoder and session, Starlette and uvicorn, and nothing else: no batches, versions,
limits, metrics or supervision. One process whose threads share a queue and the weights was the best of the
tries: see docs/architecture.md.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from loadtest.bench.plan import PRECISIONS
from nereid.base import assets
from nereid.base.config.model_config import ModelConfig
from nereid.base.processes import available_cores
from nereid.vision.imaging.pipeline import Pipeline
from nereid.vision.inference.session import Session

PATH = "/classify/"
TOP = 5


class Service:
    """Classifies photos on a thread per core, and one that is ready when another waits for Python's lock."""

    def __init__(self) -> None:
        network = assets.REPOSITORY / "efficientnet_lite0"
        self._sessions = {
            precision: Session.from_config(ModelConfig.from_file(network, version))
            for precision, version in PRECISIONS.items()
        }
        self._of_thread = threading.local()
        self._threads = ThreadPoolExecutor(available_cores() + 1, initializer=self._prepare)
        self._answered = 0

    def _prepare(self) -> None:
        config = ModelConfig.from_file(assets.REPOSITORY / "imagenet_preprocess", 1)
        self._of_thread.pipeline = Pipeline.from_config(config, 1, available_cores())

    async def classify(self, request: Request) -> JSONResponse:
        """Answer with the five best classes of the photo in the body."""
        precision, photo = request.path_params["precision"], await request.body()
        best = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, precision, photo)
        self._answered += 1
        return JSONResponse(best)

    async def statistics(self, request: Request) -> JSONResponse:
        """Return the number of answers, where Triton has it."""
        return JSONResponse({"model_stats": [{"inference_stats": {"success": {"count": self._answered}}}]})

    def _run(self, precision: str, photo: bytes) -> list[tuple[int, float]]:
        tensor = self._of_thread.pipeline.run([[photo]]).tensor
        ((scores,),) = self._sessions[precision].run({"input": tensor}, ["scores"])
        return [(int(index), float(scores[index])) for index in np.argsort(scores)[: -TOP - 1 : -1]]


def app() -> Starlette:
    """Return the service; uvicorn calls it."""
    service = Service()
    return Starlette(
        routes=[
            Route(f"{PATH}{{precision}}", service.classify, methods=["POST"]),
            Route("/v2/models/{model}/stats", service.statistics),
        ]
    )
