"""Images in this machine's shared memory: a request names a region instead of carrying its images.

A server may go on reading a region after its owner has stopped waiting for the response. Such a region is not
reused, and is removed once the server has released it. Triton 24.10 refuses to release one it is reading.
"""

import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tritonclient.utils import shared_memory

from nereid.base.contract import RESTRICTED_TEXT
from nereid.client import transport
from nereid.client.client_errors import (
    NereidError,
    Overloaded,
    TimedOut,
    Unavailable,
    Unreachable,
    is_final,
)
from nereid.client.request import MemoryKind, region_tensor
from nereid.client.retry import Attempts
from nereid.client.transport import BlockingConnection, Connection

SHM_FOLDER = Path("/dev/shm")
# The GPU used for all CUDA regions.
CUDA_DEVICE_ID = 0
MIN_REGION_BYTES = 2**20
# Triton's messages: it is reading a region and will not release it; the file is missing or not readable.
IN_USE_TEXT, NO_FILE_TEXT = "currently in use", "Unable to open shared memory"
# Seconds before shared memory is tried again after a refusal.
RETRY_INTERVAL_S = 60.0
# How long `close` waits for a server that is reading, and its retry interval, in seconds.
CLOSE_TIMEOUT_S, CLOSE_RETRY_INTERVAL_S = 2.0, 0.05
# Seconds before asking again for a region that the server is reading.
RELEASE_RETRY_INTERVAL_S = 1.0
# Files younger than this, in seconds, may not have been locked by their owner yet.
MAX_UNLOCKED_AGE_S = 60.0
log = logging.getLogger("nereid.client")


class NoCuda(RuntimeError):
    """CUDA shared memory does not work on this machine; the message suggests a fix."""


class SharedMemoryRefused(Exception):
    """The server or this machine cannot provide shared memory for a request; the server has not run it."""


class Region:
    """Memory on this machine or its first GPU.

    A lock on the file shows that its owner is alive. Python removes the file of a killed process; the next
    client removes it if a whole process group was killed.

    Attributes:
        name: name of the region on the server and of its file.
        byte_size: size in bytes.
        registration: arguments for tritonclient's registration method.
        is_registered: whether the server has confirmed the registration.
        is_open: whether the memory has not been freed yet.

    Raises:
        SharedMemoryRefused: this machine has no room for the region.
    """

    is_registered, is_open = False, True

    def __init__(self, kind: MemoryKind, byte_size: int) -> None:
        self.name, self.byte_size = f"{name_prefix()}{secrets.token_hex(8)}", byte_size
        self.registration: tuple[Any, ...]
        self._library: Any = cuda_library() if kind == "cuda" else shared_memory
        self._file: BinaryIO | None = None
        if kind == "cuda":
            try:
                self._handle = self._library.create_shared_memory_region(self.name, byte_size, CUDA_DEVICE_ID)
            except self._library.CudaSharedMemoryException as error:
                raise SharedMemoryRefused(f"no memory of GPU {CUDA_DEVICE_ID}: {error}") from None
            handle = self._library.get_raw_handle(self._handle)
            self.registration = self.name, handle, CUDA_DEVICE_ID, byte_size
            return
        try:
            self._handle = shared_memory.create_shared_memory_region(self.name, self.name, byte_size, True)
        except shared_memory.SharedMemoryException as error:
            raise SharedMemoryRefused(str(error.__cause__)) from None
        self.registration = self.name, f"/{self.name}", byte_size
        try:
            self._file = (SHM_FOLDER / self.name).open("r+b")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # Reserve the memory now: writing to memory that the kernel cannot provide kills this process.
            os.posix_fallocate(self._file.fileno(), 0, byte_size)
        except OSError as error:
            self.destroy()
            reason = OSError(error.errno, error.strerror, str(SHM_FOLDER / self.name))
            raise SharedMemoryRefused(str(reason)) from None

    def write(self, parts: Sequence[bytes]) -> None:
        """Write the parts consecutively from the start of the region."""
        arrays = [np.frombuffer(part, np.uint8) for part in parts if part]
        self._library.set_shared_memory_region(self._handle, arrays)

    def destroy(self) -> None:
        """Free the memory; a server that has mapped the file keeps its content."""
        if self.is_open:
            self.is_open = False
            with suppress(FileNotFoundError):
                self._library.destroy_shared_memory_region(self._handle)
            if self._file:
                self._file.close()

    def leave(self) -> None:
        """Free the memory; GPU memory, which the server may still read, is freed when this process exits."""
        if self._library is shared_memory:
            self.destroy()
        else:
            _KEPT_HANDLES.append(self._handle)


# tritonclient frees GPU memory when the last reference to its handle is dropped.
_KEPT_HANDLES: list[Any] = []


class SharedMemory:
    """The regions of one client: one per request in flight, kept for later requests.

    Args:
        kind: `system`, or `cuda` for memory on the first GPU.
        clock: monotonic clock, in seconds.

    Attributes:
        refusal: why images are sent in requests instead; empty while shared memory is not refused.

    Raises:
        NoCuda: the machine has no GPU, or a library is missing.
    """

    def __init__(
        self, kind: MemoryKind, connection: Connection, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if kind == "cuda":
            cuda_library()
        self.refusal = ""
        self._kind, self._connection, self._clock = kind, connection, clock
        self._retry_at = self._release_at = 0.0
        self._is_closed = self._is_swept = False
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._idle: list[Region] = []
        # Regions that no request will use again, but the server may still be reading.
        self._retired: list[Region] = []

    async def infer(
        self, files: Sequence[bytes], attempts: Attempts, infer: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        """Return the result of a request that names a region, or None while shared memory is refused.

        Args:
            files: the images of one request.
            infer: sends the request, given its input tensor.

        Raises:
            NereidError: the request failed.
            RuntimeError: the client is closed.
        """
        if self.refusal and self._clock() < self._retry_at:
            return None
        if os.getpid() != self._owner:  # a forked process leaves the regions to its parent
            self._owner = os.getpid()
            self._lock = threading.Lock()
            self._idle = []
            self._retired = []
        try:
            if self._retired and self._clock() >= self._release_at:
                self._release_at = self._clock() + RELEASE_RETRY_INTERVAL_S
                with suppress(TimedOut, Unreachable):  # regions can wait; the request has its own attempts
                    if not await self._release_retired(self._connection, attempts.remaining_s):
                        self._release_at = 0.0
            result = await self._infer(files, attempts, infer)
        except SharedMemoryRefused as error:
            with self._lock:  # requests in several threads may fail together, but only one warns
                is_new = not self.refusal
                self.refusal, self._retry_at = str(error), self._clock() + RETRY_INTERVAL_S
            if is_new:
                log.warning("images are sent in requests, not in shared memory: %s", error)
            return None
        self.refusal = ""
        return result

    def on_reconnect(self) -> None:
        """Try shared memory again on the next request, because a different server may respond."""
        self._retry_at = 0.0

    def close(self) -> None:
        """Release the regions on the server and remove them; a request in flight removes its own."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._is_closed = True
            self._retired += self._idle
            self._idle = []
        if not self._retired:
            return
        connection = BlockingConnection(self._connection.url, self._connection.protocol)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        with suppress(TimedOut, Unreachable):
            while (
                transport.run(self._release_retired(connection, lambda: CLOSE_TIMEOUT_S))
                and time.monotonic() < deadline
            ):
                time.sleep(CLOSE_RETRY_INTERVAL_S)
        connection.close()
        for region in self._retired:
            region.leave()

    async def _infer(
        self, files: Sequence[bytes], attempts: Attempts, infer: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        parts = [part for file in files for part in (len(file).to_bytes(4, "little"), file)]
        byte_size = sum(map(len, parts))
        region, is_free, lost = self._acquire_region(byte_size), False, ""
        try:
            region.write(parts)
            tensor = region_tensor(self._connection.protocol, len(files), region.name, byte_size)
            for _ in range(2):
                if not region.is_registered:
                    await self._register(region, attempts)
                try:
                    result = await infer(tensor)
                    is_free = True
                    return result
                except NereidError as error:
                    if region.name not in str(error):
                        is_free = is_final(error)
                        raise
                    # The server has lost the region, for example in a restart.
                    lost, region.is_registered = str(error), False
            # There are several servers behind one address, and they do not share regions.
            raise SharedMemoryRefused(f"the server does not keep its regions ({lost})")
        except SharedMemoryRefused:
            if not lost:  # otherwise a server may still have it
                region.leave()
            raise
        finally:
            with self._lock:
                if self._is_closed:
                    region.leave()
                elif region.is_open:
                    (self._idle if is_free else self._retired).append(region)

    async def _register(self, region: Region, attempts: Attempts) -> None:
        name = f"register_{self._kind}_shared_memory"
        try:
            await self._connection.call(name, attempts.remaining_s(), *region.registration)
        except NereidError as error:
            raise _refusal(error) from None
        region.is_registered = True
        if self._kind == "system" and not self._is_swept:
            self._is_swept = True
            with suppress(NereidError):
                await self._sweep(attempts)

    async def _sweep(self, attempts: Attempts) -> None:
        """Remove this user's regions whose owners were killed or could not wait for the server.

        The server has just opened a file created by this process, so both see the same files.
        """
        for path in SHM_FOLDER.glob(f"{name_prefix()}*"):
            _remove_if_stale(path)
        reply = await self._connection.read("get_system_shared_memory_status", attempts.remaining_s())
        names = reply.get("regions", {}) if isinstance(reply, Mapping) else [entry["name"] for entry in reply]
        for name in names:
            if name.startswith(name_prefix()) and not (SHM_FOLDER / name).exists():
                await self._connection.call("unregister_system_shared_memory", attempts.remaining_s(), name)

    def _acquire_region(self, byte_size: int) -> Region:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the client is closed")
            matches = [region for region in self._idle if region.byte_size >= byte_size]
            if region := min(matches, key=lambda region: region.byte_size, default=None):
                self._idle.remove(region)
                return region
            if self._idle:
                self._retired.append(self._idle.pop())
        return Region(self._kind, max(MIN_REGION_BYTES, 1 << (byte_size - 1).bit_length()))

    async def _release_retired(self, connection: Connection, remaining_s: Callable[[], float]) -> bool:
        """Release and remove retired regions; return whether the server is still reading any of them."""
        with self._lock:
            waiting, self._retired = self._retired, []
        in_use = []
        try:
            while waiting:
                try:
                    name = f"unregister_{self._kind}_shared_memory"
                    await connection.call(name, remaining_s(), waiting[-1].name)
                except NereidError as error:
                    if isinstance(error, (TimedOut, Unreachable)):
                        raise
                    if IN_USE_TEXT in str(error):
                        in_use.append(waiting.pop())
                        continue
                waiting.pop().destroy()
        finally:
            with self._lock:
                self._retired += waiting + in_use
        return bool(in_use)


def _refusal(error: NereidError) -> NereidError | SharedMemoryRefused:
    """Return the refusal of shared memory that a response reports, with its fix, or the error unchanged."""
    if isinstance(error, (TimedOut, Unreachable, Unavailable, Overloaded)):  # late, absent or busy
        return error
    text = str(error)
    if RESTRICTED_TEXT in text:
        reason = "this server does not allow shared memory; fix: nereid serve --allow-shm"
    elif NO_FILE_TEXT in text:
        reason = f"the server cannot open the region: it needs this machine's {SHM_FOLDER}, and this user"
    else:
        reason = "the server refuses shared memory, as gateways and proxies do"
    return SharedMemoryRefused(f"{reason} ({text})")


def _remove_if_stale(path: Path) -> None:
    """Remove the file of a region whose owner is no longer running."""
    with suppress(OSError):  # its owner holds the lock, or has removed it
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(handle)
            if status.st_uid == os.getuid() and status.st_mtime < time.time() - MAX_UNLOCKED_AGE_S:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        finally:
            os.close(handle)


def name_prefix() -> str:
    """Return the name prefix of this user's regions."""
    return f"nereid-{os.getuid()}-"


def cuda_library() -> Any:
    """Return tritonclient's CUDA shared memory module.

    Raises:
        NoCuda: the machine has no GPU, or a library is missing.
    """
    needs = "CUDA shared memory needs an NVIDIA GPU and the package cuda-python"
    try:
        from cuda.bindings import runtime
        from tritonclient.utils import cuda_shared_memory
    except (ImportError, RuntimeError) as error:
        raise NoCuda(f"{needs}: {error}; fix: pip install 'tritonclient[cuda]'") from None
    status, count = runtime.cudaGetDeviceCount()
    if status != runtime.cudaError_t.cudaSuccess or not count:
        raise NoCuda(f"{needs}: {status.name}; fix: use system shared memory")
    return cuda_shared_memory
