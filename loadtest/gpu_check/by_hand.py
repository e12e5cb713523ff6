"""The GPU service that an engineer would write by hand: the peer of Nereid on the same GPU.

One process of Starlette and uvicorn collects requests into batches for one thread on the GPU. It has no
versions, limits, metrics or supervision, and one bad image fails its whole batch. PyTorch, torchvision and
timm are imported where they are used, because no other part of this project needs them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nereid.base.assets import COFFEE

PATH = "/classify"
PACKAGES = ("torch", "torchvision", "timm")
BATCH, WAIT_S = 32, 0.002
SHORTER_PX, SIDE_PX = 256, 224
MEAN, STD = 127.0, 128.0
Item = tuple[bytes, asyncio.Future[np.ndarray]]
Scores = Callable[[Sequence[bytes]], np.ndarray]


class Torch:
    """torchvision's decoder and transforms, and timm's network, with random weights: only speed counts."""

    def __init__(self) -> None:
        self._torch = import_module("torch")
        network = import_module("timm").create_model("efficientnet_lite0", pretrained=False)
        self._network = network.eval().to("cuda")
        self._io = import_module("torchvision.io")
        self._transforms = import_module("torchvision.transforms.v2.functional")

    def scores(self, photos: Sequence[bytes]) -> np.ndarray:
        """Return the scores of JPEG photos: float32[N, 1000], on the host."""
        with self._torch.inference_mode():
            files = [self._torch.frombuffer(bytearray(photo), dtype=self._torch.uint8) for photo in photos]
            decoded = self._io.decode_jpeg(files, mode=self._io.ImageReadMode.RGB, device="cuda")
            tensor = self._torch.stack([self._crop(image) for image in decoded]).float()
            tensor = self._transforms.normalize(tensor, mean=[MEAN] * 3, std=[STD] * 3)
            return np.asarray(self._network(tensor).softmax(1).cpu().numpy())

    def _crop(self, image: Any) -> Any:
        resized = self._transforms.resize(image, [SHORTER_PX], antialias=True)
        return self._transforms.center_crop(resized, [SIDE_PX, SIDE_PX])


class Batcher:
    """Runs requests in batches of at most `limit`, which wait up to `wait_s` for more, on one thread."""

    def __init__(self, scores: Scores, limit: int, wait_s: float) -> None:
        self._scores, self._limit, self._wait_s = scores, limit, wait_s
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1)

    async def classify(self, request: Request) -> Response:
        """Answer the JPEG in the body with the bytes of its scores: float32[1000], little-endian."""
        future: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((await request.body(), future))
        return Response((await future).tobytes(), media_type="application/octet-stream")

    async def run(self) -> None:
        """Run batch after batch, until cancelled."""
        while True:
            items = await self._next()
            photos, loop = [photo for photo, _ in items], asyncio.get_running_loop()
            try:
                rows = await loop.run_in_executor(self._thread, self._scores, photos)
            except Exception as error:  # the answer to these requests; the next batch may succeed
                for _, future in items:
                    if not future.done():
                        future.set_exception(RuntimeError(f"batch of {len(items)}: {error}"))
                continue
            for (_, future), row in zip(items, rows, strict=True):
                if not future.done():
                    future.set_result(row)

    async def _next(self) -> list[Item]:
        items = [await self._queue.get()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                while len(items) < self._limit:
                    items.append(await self._queue.get())
        return items


def app() -> Starlette:
    """Return the service after every batch size has run once; uvicorn calls it before it opens the port."""
    scores = Torch().scores
    for size in (1, BATCH):
        scores([COFFEE.read_bytes()] * size)
    batcher = Batcher(scores, BATCH, WAIT_S)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    return Starlette(routes=[Route(PATH, batcher.classify, methods=["POST"])], lifespan=lifespan)
