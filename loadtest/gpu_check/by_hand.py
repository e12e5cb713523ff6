"""The GPU service that an engineer would write by hand: the peer of Nereid on the same GPU.

One process of Starlette and uvicorn collects requests into batches for one thread on the GPU. It has no
versions, limits, metrics or supervision, and one bad image fails its whole batch. Unlike Nereid, the
kind `onnxruntime` resizes without antialiasing. Its batches are filled up to `--batch`, because ONNX Runtime
plans each change of the size anew. CuPy, ONNX Runtime and torch are imported where they are used, because
each kind runs without the other's.

    python -m loadtest.gpu_check.by_hand --kind onnxruntime --port 9000
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from nereid.assets import COFFEE, REPOSITORY
from nereid.processes import end_with_parent

PATH, HEALTH, HOST = "/classify", "/healthz", "127.0.0.1"
NETWORK = REPOSITORY / "efficientnet_lite0" / "1" / "model.onnx"
SHORTER_PX, SIDE_PX = 256, 224
MEAN, STD = 127.0, 128.0
START_S, STOP_S, POLL_S = 60.0, 5.0, 0.1
Item = tuple[bytes, asyncio.Future[np.ndarray]]
Scores = Callable[[Sequence[bytes]], np.ndarray]


class OnnxRuntime:
    """nvImageCodec, CuPy and ONNX Runtime's CUDA provider; on the CPU simplejpeg and NumPy."""

    def __init__(self, device: str, batch: int) -> None:
        import onnxruntime

        self._device, self._batch = device, batch if device == "cuda" else 0
        self._xp = import_module("cupy" if device == "cuda" else "numpy")
        self._decode = _gpu_decoder() if device == "cuda" else _decode_on_host
        # The default searches the algorithms of each new batch size exhaustively, for seconds.
        cuda = ("CUDAExecutionProvider", {"cudnn_conv_algo_search": "HEURISTIC"})
        if device == "cuda":
            onnxruntime.preload_dlls()  # CUDA's and cuDNN's libraries from wheels
        wanted = [cuda] if device == "cuda" else ["CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(str(NETWORK), providers=wanted)
        found = self._session.get_providers()[0]
        if device == "cuda" and found != cuda[0]:  # ONNX Runtime only warns
            raise RuntimeError(f"expected {cuda[0]}, got {found}; the warnings above name the library")
        self._samples = lru_cache(maxsize=16)(lambda height, width: samples(self._xp, height, width))

    def scores(self, photos: Sequence[bytes]) -> np.ndarray:
        """Return the scores of JPEG photos: float32[N, 1000], on the host."""
        decoded = self._decode(photos)  # kept until the run ends: the GPU reads the pixels later
        pixels = self._xp.stack([self._crop(self._xp.asarray(image)) for image in decoded])
        tensor = self._xp.zeros((max(self._batch, len(photos)), 3, SIDE_PX, SIDE_PX), np.float32)
        tensor[: len(photos)] = ((pixels - MEAN) / STD).transpose(0, 3, 1, 2)
        if self._device == "cuda":
            self._xp.cuda.get_current_stream().synchronize()  # ONNX Runtime has a stream of its own
        binding = self._session.io_binding()
        address = tensor.data.ptr if self._device == "cuda" else tensor.ctypes.data
        binding.bind_input("input", self._device, 0, np.float32, tensor.shape, address)
        binding.bind_output("scores")
        self._session.run_with_iobinding(binding)
        (scores,) = binding.copy_outputs_to_cpu()
        return np.asarray(scores)[: len(photos)]

    def _crop(self, image: Any) -> Any:
        """Resize and crop uint8[H, W, 3] to float32[224, 224, 3], three launches on a GPU."""
        indices, weights = self._samples(*image.shape[:2])
        return (image.reshape(-1, 3).take(indices, axis=0) * weights).sum(axis=0)


class Torch:
    """torchvision's decoder and transforms, and timm's network, with random weights: only speed counts."""

    def __init__(self, device: str, batch: int) -> None:
        self._torch, self._device = import_module("torch"), device
        network = import_module("timm").create_model("efficientnet_lite0", pretrained=False)
        self._network = network.eval().to(device)
        self._io = import_module("torchvision.io")
        self._transforms = import_module("torchvision.transforms.v2.functional")

    def scores(self, photos: Sequence[bytes]) -> np.ndarray:
        """Return the scores of JPEG photos: float32[N, 1000], on the host."""
        with self._torch.inference_mode():
            files = [self._torch.frombuffer(bytearray(each), dtype=self._torch.uint8) for each in photos]
            decoded = self._io.decode_jpeg(files, mode=self._io.ImageReadMode.RGB, device=self._device)
            tensor = self._torch.stack([self._crop(image) for image in decoded]).float()
            tensor = self._transforms.normalize(tensor, mean=[MEAN] * 3, std=[STD] * 3)
            return np.asarray(self._network(tensor).softmax(1).cpu().numpy())

    def _crop(self, image: Any) -> Any:
        resized = self._transforms.resize(image, [SHORTER_PX], antialias=True)
        return self._transforms.center_crop(resized, [SIDE_PX, SIDE_PX])


KINDS: dict[str, Callable[[str, int], OnnxRuntime | Torch]] = {"onnxruntime": OnnxRuntime, "torch": Torch}


def samples(xp: Any, height: int, width: int) -> tuple[Any, Any]:
    """Return where the bilinear crop reads an image of `height` x `width` pixels, and with which weights.

    Returns:
        int64[4, 224, 224], indices of pixels in the flattened image; float32[4, 224, 224, 1].
    """

    def along(length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scale = min(height, width) / SHORTER_PX
        centres = (np.arange(SIDE_PX) + 0.5 - SIDE_PX / 2) * scale + length / 2 - 0.5
        at = np.clip(centres, 0, length - 1)
        first = np.floor(at).astype(np.int64)
        return first, np.minimum(first + 1, length - 1), at - first

    (top, bottom, down), (left, right, across) = along(height), along(width)
    corners = [
        (y, x) for y in ((top, 1 - down), (bottom, down)) for x in ((left, 1 - across), (right, across))
    ]
    indices = [y[:, None] * width + x for (y, _), (x, _) in corners]
    weights = [np.outer(of_y, of_x)[..., None] for (_, of_y), (_, of_x) in corners]
    return xp.asarray(np.stack(indices)), xp.asarray(np.stack(weights), dtype=np.float32)


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


def app(scores: Scores, batch: int, wait_ms: float) -> Starlette:
    """Return the service."""
    batcher = Batcher(scores, batch, wait_ms / 1e3)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    async def health(_: Request) -> PlainTextResponse:
        return PlainTextResponse("ready")

    routes = [Route(PATH, batcher.classify, methods=["POST"]), Route(HEALTH, health)]
    return Starlette(routes=routes, lifespan=lifespan)


@contextlib.contextmanager
def start(kind: str, port: int, environment: Mapping[str, str], device: str = "cuda") -> Iterator[None]:
    """Run the service in a process of its own, and wait until it is ready.

    Raises:
        RuntimeError: the service ended, or was not ready after `START_S`.
    """
    words = [sys.executable, "-m", "loadtest.gpu_check.by_hand", "--kind", kind, "--port", str(port)]
    words += ["--device", device]
    process = subprocess.Popen(words, env=environment, preexec_fn=end_with_parent())
    try:
        end_s = time.monotonic() + START_S
        while not _is_ready(port):
            if (code := process.poll()) is not None or time.monotonic() > end_s:
                state = f"not ready after {START_S:.0f} s" if code is None else f"exit code {code}"
                raise RuntimeError(f"the service by hand ({kind}): {state}; its log is above")
            time.sleep(POLL_S)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:  # a hang in CUDA ignores SIGTERM
            process.kill()
            process.wait()


def main() -> None:
    """Serve until a signal; the port opens after every batch size has run once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=[*KINDS], required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch", type=int, default=32, help="maximum batch size")
    parser.add_argument("--wait-ms", type=float, default=2.0, help="wait of a batch for more, in ms")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    args = parser.parse_args()
    network, photo = KINDS[args.kind](args.device, args.batch), COFFEE.read_bytes()
    for size in (1, args.batch):
        network.scores([photo] * size)
    service = app(network.scores, args.batch, args.wait_ms)
    uvicorn.run(service, host=HOST, port=args.port, access_log=False, log_level="warning")


def _gpu_decoder() -> Callable[[Sequence[bytes]], list[Any]]:
    nvimgcodec, cupy = import_module("nvidia.nvimgcodec"), import_module("cupy")
    decoder = nvimgcodec.Decoder(device_id=0)

    def decode(photos: Sequence[bytes]) -> list[Any]:
        images = decoder.decode(list(photos), cuda_stream=cupy.cuda.get_current_stream().ptr)
        if any(image is None for image in images):
            raise ValueError("expected JPEGs, got a file that nvImageCodec cannot decode")
        return list(images)

    return decode


def _decode_on_host(photos: Sequence[bytes]) -> list[Any]:
    import simplejpeg

    return [simplejpeg.decode_jpeg(photo, colorspace="RGB") for photo in photos]


def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{port}{HEALTH}", timeout=1):
        return True
    return False


if __name__ == "__main__":
    main()
