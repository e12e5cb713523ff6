"""Images in shared memory of this machine: a request names a region instead of carrying its images.

A server may read a region for longer than its owner waits for the response. Such a region is not written
again, and is removed after the server has released it. Triton 24.10 refuses to release one that it reads.
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
from nereid.client.classifier_errors import (
    ClassifierError,
    Overloaded,
    TimedOut,
    Unavailable,
    Unreachable,
    is_final,
)
from nereid.client.request import MemoryKind, region_tensor
from nereid.client.retry import Attempts
from nereid.client.transport import BlockingConnection, Connection, run

FOLDER = Path("/dev/shm")
# The GPU of all CUDA regions.
DEVICE = 0
MIN_REGION_BYTES = 2**20
# Texts of Triton: it reads a region, and does not release it; it has no such file, or may not read it.
IN_USE_TEXT, NO_FILE_TEXT = "currently in use", "Unable to open shared memory"
# Seconds until shared memory is tried again after a refusal.
RETRY_S = 60.0
# `close` waits so long for a server that reads, and tries to release a region so often, in seconds.
CLOSE_S, CLOSE_RETRY_S = 2.0, 0.05
# A server that reads a region is asked again so many seconds later.
RELEASE_RETRY_S = 1.0
# Files younger than this may not have their owner's lock yet.
NEW_FILE_S = 60.0
log = logging.getLogger("nereid.client")


class NoCuda(RuntimeError):
    """CUDA shared memory does not work on this machine; the message names the fix."""


class SharedMemoryRefused(Exception):
    """The server or this machine has no shared memory for a request, which the server has not run."""


class Region:
    """Memory of this machine or of its first GPU.

    A lock on the file shows that its owner lives: Python removes the file of a killed process, and the next
    client that of a killed group of processes.

    Attributes:
        name: name of the region on the server, and of its file.
        byte_size: size in bytes.
        registration: arguments of tritonclient's method of registration.
        is_registered: the server has confirmed the registration.
        is_open: the memory is not freed.

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
                self._handle = self._library.create_shared_memory_region(self.name, byte_size, DEVICE)
            except self._library.CudaSharedMemoryException as error:
                raise SharedMemoryRefused(f"no memory of GPU {DEVICE}: {error}") from None
            handle = self._library.get_raw_handle(self._handle)
            self.registration = self.name, handle, DEVICE, byte_size
            return
        try:
            self._handle = shared_memory.create_shared_memory_region(self.name, self.name, byte_size, True)
        except shared_memory.SharedMemoryException as error:
            raise SharedMemoryRefused(str(error.__cause__)) from None
        self.registration = self.name, f"/{self.name}", byte_size
        try:
            self._file = (FOLDER / self.name).open("r+b")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # Reserved now: a write to memory that the kernel cannot provide kills this process.
            os.posix_fallocate(self._file.fileno(), 0, byte_size)
        except OSError as error:
            self.destroy()
            reason = OSError(error.errno, error.strerror, str(FOLDER / self.name))
            raise SharedMemoryRefused(str(reason)) from None

    def write(self, parts: Sequence[bytes]) -> None:
        """Write parts one after the other, from the start of the region."""
        arrays = [np.frombuffer(part, np.uint8) for part in parts if part]
        self._library.set_shared_memory_region(self._handle, arrays)

    def destroy(self) -> None:
        """Free the memory; a server that has mapped a file keeps its content."""
        if self.is_open:
            self.is_open = False
            with suppress(FileNotFoundError):
                self._library.destroy_shared_memory_region(self._handle)
            if self._file:
                self._file.close()

    def leave(self) -> None:
        """Free the memory; the GPU's, which the server may still read, only with this process."""
        if self._library is shared_memory:
            self.destroy()
        else:
            _LEFT.append(self._handle)


# tritonclient frees memory of the GPU with the last reference to its handle.
_LEFT: list[Any] = []


class SharedMemory:
    """The regions of one client: one for each request in flight, kept for later requests.

    Args:
        kind: `system`, or `cuda` for memory of the first GPU.
        connection: the client's.
        clock: monotonic clock, in seconds.

    Attributes:
        refusal: why images are sent in requests instead; empty while nothing was refused.

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
        self._retry_at_s = self._release_at_s = 0.0
        self._is_closed = self._is_swept = False
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._idle: list[Region] = []
        # Regions that no request uses again; the server may still read them.
        self._retired: list[Region] = []

    async def infer(
        self, files: Sequence[bytes], attempts: Attempts, infer: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        """Return the result of a request that names a region; None while shared memory is refused.

        Args:
            files: images of one request.
            attempts: time limit of the request.
            infer: sends the request, given its input tensor.

        Raises:
            ClassifierError: the request failed.
            RuntimeError: the classifier is closed.
        """
        if self.refusal and self._clock() < self._retry_at_s:
            return None
        if os.getpid() != self._owner:  # a fork leaves the regions to its parent
            self._owner, self._lock, self._idle, self._retired = os.getpid(), threading.Lock(), [], []
        try:
            if self._retired and self._clock() >= self._release_at_s:
                self._release_at_s = self._clock() + RELEASE_RETRY_S
                with suppress(TimedOut, Unreachable):  # the regions wait; the request has its own attempts
                    if not await self._release_retired(self._connection, attempts.remaining_s):
                        self._release_at_s = 0.0
            result = await self._infer(files, attempts, infer)
        except SharedMemoryRefused as error:
            with self._lock:  # requests of several threads fail together, and one of them warns
                is_new = not self.refusal
                self.refusal, self._retry_at_s = str(error), self._clock() + RETRY_S
            if is_new:
                log.warning("images are sent in requests, not in shared memory: %s", error)
            return None
        self.refusal = ""
        return result

    def reconnected(self) -> None:
        """Try shared memory again with the next request: another server may respond."""
        self._retry_at_s = 0.0

    def close(self) -> None:
        """Release the regions on the server, and remove them; a request in flight removes its own."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._is_closed = True
            self._retired += self._idle
            self._idle = []
        if not self._retired:
            return
        connection = BlockingConnection(self._connection.url, self._connection.protocol)
        deadline = time.monotonic() + CLOSE_S
        with suppress(TimedOut, Unreachable):
            while run(self._release_retired(connection, lambda: CLOSE_S)) and time.monotonic() < deadline:
                time.sleep(CLOSE_RETRY_S)
        connection.close()
        for region in self._retired:
            region.leave()

    async def _infer(
        self, files: Sequence[bytes], attempts: Attempts, infer: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        parts = [part for file in files for part in (len(file).to_bytes(4, "little"), file)]
        byte_size = sum(map(len, parts))
        region, is_free, lost = self._taken(byte_size), False, ""
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
                except ClassifierError as error:
                    if region.name not in str(error):
                        is_free = is_final(error)
                        raise
                    # The server has lost the region, as after a restart.
                    lost, region.is_registered = str(error), False
            # Several servers behind one address: none of them has the regions of the others.
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
        except ClassifierError as error:
            raise _refusal(error) from None
        region.is_registered = True
        if self._kind == "system" and not self._is_swept:
            self._is_swept = True
            with suppress(ClassifierError):
                await self._sweep(attempts)

    async def _sweep(self, attempts: Attempts) -> None:
        """Remove the regions of this user's owners that were killed, or could not wait for the server.

        The server has just opened a file of this process, so both see the same files.
        """
        for path in FOLDER.glob(f"{name_prefix()}*"):
            _remove_if_stale(path)
        known = await self._connection.read("get_system_shared_memory_status", attempts.remaining_s())
        names = known.get("regions", {}) if isinstance(known, Mapping) else [entry["name"] for entry in known]
        for name in names:
            if name.startswith(name_prefix()) and not (FOLDER / name).exists():
                await self._connection.call("unregister_system_shared_memory", attempts.remaining_s(), name)

    def _taken(self, byte_size: int) -> Region:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the classifier is closed")
            fitting = [region for region in self._idle if region.byte_size >= byte_size]
            if region := min(fitting, key=lambda region: region.byte_size, default=None):
                self._idle.remove(region)
                return region
            if self._idle:
                self._retired.append(self._idle.pop())
        return Region(self._kind, max(MIN_REGION_BYTES, 1 << (byte_size - 1).bit_length()))

    async def _release_retired(self, connection: Connection, remaining_s: Callable[[], float]) -> bool:
        """Release and remove the regions that no request uses again; return whether the server reads some."""
        with self._lock:
            waiting, self._retired = self._retired, []
        in_use = []
        try:
            while waiting:
                try:
                    name = f"unregister_{self._kind}_shared_memory"
                    await connection.call(name, remaining_s(), waiting[-1].name)
                except ClassifierError as error:
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


def _refusal(error: ClassifierError) -> ClassifierError | SharedMemoryRefused:
    """Return the refusal of shared memory in a response, with its fix; else the error itself."""
    if isinstance(error, (TimedOut, Unreachable, Unavailable, Overloaded)):  # late, not there, or busy
        return error
    text = str(error)
    if RESTRICTED_TEXT in text:
        what = "this server does not allow shared memory; fix: nereid serve --allow-shm"
    elif NO_FILE_TEXT in text:
        what = f"the server cannot open the region: it needs this machine's {FOLDER}, and this user"
    else:
        what = "the server refuses shared memory, as gateways and proxies do"
    return SharedMemoryRefused(f"{what} ({text})")


def _remove_if_stale(path: Path) -> None:
    """Remove the file of a region whose owner does not live."""
    with suppress(OSError):  # its owner holds the lock, or has removed it
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(handle)
            if status.st_uid == os.getuid() and status.st_mtime < time.time() - NEW_FILE_S:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        finally:
            os.close(handle)


def name_prefix() -> str:
    """Return the start of the names of this user's regions."""
    return f"nereid-{os.getuid()}-"


def cuda_library() -> Any:
    """Return tritonclient's module for CUDA shared memory.

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
