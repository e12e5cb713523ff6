"""Classify images on a Triton server from asyncio."""

import asyncio
import time
from types import TracebackType
from typing import Any, Unpack

import tritonclient.grpc.aio
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from clients import prediction
from clients.errors import ClassifierError, TimedOut, Unreachable, from_triton
from clients.prediction import Prediction, Timings
from clients.request import CHANNEL, TIMEOUT_S, Ask, Options, Protocol, ask, image_tensor, wanted_outputs
from clients.retry import Attempts, Budget


class AsyncClassifier:
    """`Classifier` for asyncio: the same arguments, the same answers.

    A call that is cancelled cancels its request on the server, too (gRPC).

    Example:
        >>> async with AsyncClassifier("localhost:8001") as classifier:
        ...     (await classifier.classify(photo)).labels[0].name
        'tabby'
    """

    def __init__(
        self, url: str, protocol: Protocol = "grpc", model: str = "classify", timeout_s: float = TIMEOUT_S
    ) -> None:
        self.model = model
        self._url = url
        self._protocol = protocol
        self._timeout_s = timeout_s
        self._budget = Budget()
        self._opened: Any = None
        self._outputs: list[str] = []

    async def __aenter__(self) -> "AsyncClassifier":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            await self._opened.close()

    async def classify(self, image: bytes, **options: Unpack[Options]) -> Prediction:
        """Classify one image; see `Classifier.classify`."""
        asked = ask(options, self._timeout_s)
        began = time.perf_counter()
        attempts = Attempts(self._budget, asked.timeout_s)
        while True:
            try:
                result = await self._infer(asked, image, attempts.remaining_s())
                break
            except ClassifierError as error:
                await asyncio.sleep(attempts.pause_s(error))
        attempts.succeeded()
        timings = Timings(0.0, (time.perf_counter() - began) * 1e3, attempts.count)
        return prediction.read(result, self.model, asked.request_id, timings)[0]

    async def _infer(self, asked: Ask, image: bytes, remaining_s: float) -> Any:
        try:
            async with asyncio.timeout(remaining_s):
                client = self._client()
                if not self._outputs:
                    self._outputs = wanted_outputs(await self._metadata(client))
                tensor = image_tensor(self._protocol, [image])
                arguments = asked.arguments(self._protocol, tensor, self._outputs, remaining_s)
                return await client.infer(self.model, **arguments)
        except TimeoutError:
            raise TimedOut(f"{self._url}: no answer within {remaining_s:.3g} s") from None
        except InferenceServerException as error:
            raise from_triton(error) from None
        except (OSError, ValueError) as error:
            raise Unreachable(f"{self._url}: {type(error).__name__}: {error}") from None

    async def _metadata(self, client: Any) -> Any:
        options = {"as_json": True} if self._protocol == "grpc" else {}
        return await client.get_model_metadata(self.model, **options)

    def _client(self) -> Any:
        if self._opened is None:
            if self._protocol == "grpc":
                self._opened = tritonclient.grpc.aio.InferenceServerClient(self._url, channel_args=CHANNEL)
            else:
                self._opened = tritonclient.http.aio.InferenceServerClient(self._url)
        return self._opened
