"""The way of images to a server: in shared memory, or in the request while shared memory is refused."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from nereid.client.request import ProtocolName, image_tensor
from nereid.client.retry import Attempts
from nereid.client.sans_io import Flow, Rpc
from nereid.client.shared_memory import Regions, SharedMemoryRefused

# Seconds until shared memory is tried again, which costs two RPCs if it is still refused.
RETRY_S = 60.0
log = logging.getLogger("nereid.client")


class ImageSender:
    """Sends the images of one client.

    Args:
        protocol: protocol of the connection.
        regions: shared memory for the images; None sends images in the request.
        clock: monotonic clock, in seconds.

    Attributes:
        refusal: why images are sent in the request instead of shared memory; empty if they are not.
    """

    def __init__(
        self, protocol: ProtocolName, regions: Regions | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.refusal = ""
        self._protocol, self._regions, self._clock = protocol, regions, clock
        self._retry_at_s = 0.0
        self._warned: dict[str, object] = {}

    def infer(self, files: Sequence[bytes], attempts: Attempts, make_rpc: Callable[[Any], Rpc]) -> Flow[Any]:
        """Return the result of a request for some images; a refusal of shared memory is not an error.

        Args:
            files: images of one request.
            attempts: time limit of the request.
            make_rpc: builds the RPC from its input tensor.

        Raises:
            ClassifierError: the RPC failed.
            RuntimeError: the classifier is closed.
        """
        if self._regions and not (self.refusal and self._clock() < self._retry_at_s):
            try:
                result = yield from self._regions.infer(files, attempts, make_rpc)
            except SharedMemoryRefused as error:
                self._refuse(str(error))
            else:
                self.refusal = ""
                self._warned.clear()
                return result
        return (yield make_rpc(image_tensor(self._protocol, files)))

    def reconnected(self) -> None:
        """Try shared memory again with the next request: another server may respond."""
        self._retry_at_s = 0.0

    def _refuse(self, reason: str) -> None:
        self.refusal, self._retry_at_s = reason, self._clock() + RETRY_S
        mine = object()
        # Requests of several threads fail together, and one of them warns.
        if self._warned.setdefault("refused", mine) is mine:
            log.warning("images are sent in requests, not in shared memory: %s", reason)
