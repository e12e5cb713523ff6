"""Images handed to a server of the same machine by shared memory: only their place is sent.

A region is a file `/dev/shm/nereid-UID-RANDOM` that its owner keeps locked. The kernel lets go of the lock
however the owner ends, so a file without it is stale. A server may read a region for longer than its owner
waits for the answer: such a region is used for nothing else, and goes when the server lets go of it, which
Triton 24.10 refuses for as long as it reads.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from nereid.client import transport
from nereid.client.classifier_errors import ClassifierError, RequestRefused, TimedOut, Unreachable, is_final
from nereid.client.request import TENSORS, ProtocolName
from nereid.client.retry import Attempts
from nereid.client.sans_io import Flow, Rpc
from nereid.contract import IMAGE, RESTRICTED_TEXT

Kind = Literal["system", "cuda"]
FOLDER = Path("/dev/shm")
SMALLEST_BYTES = 2**20
# In Triton's refusal to let go of a region that it reads, and how long to wait before asking again: while
# requests come, and at the end.
IN_USE, RELEASE_RETRY_S, CLOSE_RETRY_S = "currently in use", 1.0, 0.05
# For each word to a server that comes after the answers, and for it to finish reading.
CLOSE_S = 2.0
NO_RESPONSE = (TimedOut, Unreachable)


class NoCuda(RuntimeError):
    """CUDA shared memory was checked for where there is none; the message has what mends it."""


class NoRoom(RequestRefused, OSError):
    """There is not enough shared memory for a request."""


class Region(Protocol):
    """Memory that a server can read once it `is_registered` there."""

    name: str
    byte_size: int
    may_be_registered: bool
    is_registered: bool
    is_in_flight: bool

    def write(self, content: Sequence[bytes]) -> None:
        """Put bytes one after the other at its start."""

    def registration(self) -> tuple[Any, ...]:
        """Return what the server is told of it."""

    def unlink(self) -> None:
        """Let nobody open it any more."""

    def leave(self) -> None:
        """Let go of it, and leave it to a sweep."""

    def remove(self) -> None:
        """Let go of it, and remove it."""


class _LockedFile:
    """A file of this process in shared memory, under a name of its own."""

    def __init__(self, byte_size: int) -> None:
        while True:
            self.name = f"{_prefix()}{secrets.token_hex(8)}"
            self._path = FOLDER / self.name
            self.handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(self.handle, fcntl.LOCK_EX)
                if byte_size:
                    # Reserved now: to write to memory that cannot be had would kill this process.
                    os.posix_fallocate(self.handle, 0, byte_size)
            except OSError as error:
                self.remove()
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            if self._path.exists():
                return
            os.close(self.handle)  # a sweep came before the lock

    def unlink(self) -> None:
        self._path.unlink(missing_ok=True)

    def leave(self) -> None:
        os.close(self.handle)

    def remove(self) -> None:
        self.unlink()
        os.close(self.handle)


class _SystemRegion:
    def __init__(self, byte_size: int) -> None:
        self._file = _LockedFile(byte_size)
        self._memory = mmap.mmap(self._file.handle, byte_size)
        self.name, self.byte_size = self._file.name, byte_size
        self.may_be_registered = self.is_registered = self.is_in_flight = False

    def write(self, content: Sequence[bytes]) -> None:
        self._memory.seek(0)
        for part in content:
            self._memory.write(part)

    def registration(self) -> tuple[Any, ...]:
        return self.name, f"/{self.name}", self.byte_size

    def unlink(self) -> None:
        self._file.unlink()

    def leave(self) -> None:
        self._memory.close()
        self._file.leave()

    def remove(self) -> None:
        self._memory.close()
        self._file.remove()


class _CudaRegion:
    """Memory of a GPU, which ends with this process; its empty file only tells a sweep of that."""

    def __init__(self, byte_size: int, device_id: int = 0) -> None:
        self._cuda = cuda_library()
        self._file = _LockedFile(0)
        self.name, self.byte_size, self._device_id = self._file.name, byte_size, device_id
        self._memory = self._cuda.create_shared_memory_region(self.name, byte_size, device_id)
        self.may_be_registered = self.is_registered = self.is_in_flight = False

    def write(self, content: Sequence[bytes]) -> None:
        self._cuda.set_shared_memory_region(self._memory, [np.frombuffer(b"".join(content), np.uint8)])

    def registration(self) -> tuple[Any, ...]:
        return self.name, self._cuda.get_raw_handle(self._memory), self._device_id, self.byte_size

    def unlink(self) -> None:
        """Do nothing: the server opens no file for it."""

    def leave(self) -> None:
        self._file.leave()  # the memory is the server's for as long as this process lives

    def remove(self) -> None:
        self._cuda.destroy_shared_memory_region(self._memory)
        self._file.remove()


MAKERS: dict[Kind, Callable[[int], Region]] = {"system": _SystemRegion, "cuda": _CudaRegion}


# Those of this process, which a fork of it leaves alone.
_OPEN: "weakref.WeakSet[Regions]" = weakref.WeakSet()


class Regions:
    """The regions of one classifier: one for each request in flight, kept for the next ones.

    Args:
        kind: `system`, or `cuda` for memory of the first GPU.
        url, protocol: of the server.
        make: makes a region of so many bytes.
        clock: monotonic, in seconds.

    Raises:
        NoCuda: there is no GPU, or no library for it.
    """

    def __init__(
        self,
        kind: Kind,
        url: str,
        protocol: ProtocolName,
        make: Callable[[int], Region] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if kind == "cuda" and make is None:
            cuda_library()
        self._kind, self._url, self._protocol = kind, url, protocol
        self._make = make or MAKERS[kind]
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[Region] = []
        self._lent: list[Region] = []
        # Those that will not be used again, and when to ask the server to let go of them.
        self._retired: list[tuple[float, Region]] = []
        self._is_swept = self._is_closed = False
        _OPEN.add(self)

    def infer(self, files: Sequence[bytes], attempts: Attempts, call: Callable[[Any], Rpc]) -> Flow[Any]:
        """Put images where the server can read them, and have it do so.

        Args:
            files: those of one request.
            call: makes the call from its tensor.

        Raises:
            ClassifierError: as the call, or the server may not or cannot read the region.
            NoRoom: there is not enough shared memory.
            RuntimeError: this is closed.
        """
        self._check_open()
        if not self._is_swept:
            yield from self._with_advice(sweep(self._protocol, attempts.remaining_s, kinds=(self._kind,)))
            self._is_swept = True
        yield from self._release_retired(attempts)
        content = [part for file in files for part in (len(file).to_bytes(4, "little"), file)]
        byte_size = sum(map(len, content))
        region = self._take(byte_size)
        try:
            region.write(content)
            tensor = TENSORS[self._protocol].InferInput(IMAGE, [len(files), 1], "BYTES")
            tensor.set_shared_memory(region.name, byte_size)
            result = yield from self._infer_from(region, attempts, lambda: call(tensor))
        except BaseException as error:
            self._return(region, error)
            raise
        self._return(region, None)
        return result

    def close(self) -> None:
        """Have the server let go of the regions, and remove them.

        What a request still uses, or the server reads for two seconds more, is left to a sweep.
        """
        with self._lock:
            self._is_closed = True
            regions = [*self._idle, *(region for _, region in self._retired)]
            self._idle, self._retired = [], []
        if not regions:
            return
        connection = transport.connect(self._url, self._protocol)
        patient_until = time.monotonic() + CLOSE_S
        try:
            is_there = True
            for region in regions:
                refusal = None
                while is_there and region.may_be_registered:
                    refusal = transport.run(connection, self._release(region, CLOSE_S))
                    is_there = not isinstance(refusal, NO_RESPONSE)
                    if not _is_in_use(refusal) or time.monotonic() > patient_until:
                        break
                    time.sleep(CLOSE_RETRY_S)
                if _is_in_use(refusal):
                    region.leave()
                else:
                    region.remove()
        finally:
            connection.close()

    def forked(self) -> None:
        """Leave all regions to the process that this one is a fork of."""
        regions = [*self._idle, *self._lent, *(region for _, region in self._retired)]
        self._lock = threading.Lock()  # another thread may have held it
        self._idle, self._lent, self._retired = [], [], []
        for region in regions:
            region.leave()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the classifier is closed")

    def _take(self, byte_size: int) -> Region:
        with self._lock:
            self._check_open()
            fitting = [region for region in self._idle if region.byte_size >= byte_size]
            region = min(fitting, key=lambda each: each.byte_size, default=None)
            if region is not None:
                self._idle.remove(region)
                self._lent.append(region)
                return region
            if self._idle:
                self._retired.append((self._clock(), self._idle.pop()))
        try:
            region = self._make(max(SMALLEST_BYTES, 1 << (byte_size - 1).bit_length()))
        except OSError as error:
            raise NoRoom(str(error)) from None
        with self._lock:
            self._lent.append(region)
        return region

    def _return(self, region: Region, error: BaseException | None) -> None:
        """Keep a region for the next request, or retire it: without an answer it may still be read."""
        with self._lock:
            if region not in self._lent:  # of a request that a fork has copied
                return
            self._lent.remove(region)
            is_free = not region.is_in_flight or error is None or is_final(error)
            if self._is_closed or not (region.is_registered and is_free):
                self._retire(region, self._clock())
            else:
                region.is_in_flight = False
                self._idle.append(region)

    def _retire(self, region: Region, due: float) -> None:
        if self._is_closed:
            region.leave()
        else:
            self._retired.append((due, region))

    def _release_retired(self, attempts: Attempts) -> Flow[None]:
        with self._lock:
            due = [pair for pair in self._retired if pair[0] <= self._clock()]
            self._retired = [pair for pair in self._retired if pair not in due]
        try:
            while due:
                _, region = due[-1]
                refusal = None
                if region.may_be_registered:
                    refusal = yield from self._release(region, attempts.remaining_s())
                due.pop()
                if _is_in_use(refusal) or isinstance(refusal, NO_RESPONSE):
                    with self._lock:
                        self._retire(region, self._clock() + RELEASE_RETRY_S)
                else:
                    region.remove()
        finally:
            with self._lock:
                for at, region in due:
                    self._retire(region, at)

    def _release(self, region: Region, timeout_s: float) -> Flow[ClassifierError | None]:
        """Have the server let go of a region that it was told of; returns why it does not."""
        if not region.is_registered:
            # It was not waited for: the server may come to it only after this, and must not find it then.
            region.unlink()
        return (yield from _unregister(self._kind, region.name, timeout_s))

    def _infer_from(self, region: Region, attempts: Attempts, call: Callable[[], Rpc]) -> Flow[Any]:
        yield from self._register(region, attempts)
        region.is_in_flight = True
        try:
            return (yield call())
        except ClassifierError as error:
            if region.name not in str(error):
                raise
        # The server does not know it: it is another one than before.
        region.is_registered = region.is_in_flight = False
        yield from self._register(region, attempts)
        region.is_in_flight = True
        return (yield call())

    def _register(self, region: Region, attempts: Attempts) -> Flow[None]:
        if region.is_registered:
            return
        name = f"register_{self._kind}_shared_memory"
        region.may_be_registered = True
        try:
            yield from self._with_advice(_one(Rpc(name, attempts.remaining_s(), region.registration())))
        except ClassifierError as error:
            if "already in manager" not in str(error):  # an answer that did not reach us
                raise
        region.is_registered = True

    def _with_advice(self, steps: Flow[Any]) -> Flow[Any]:
        try:
            return (yield from steps)
        except ClassifierError as error:
            text = str(error)
            if RESTRICTED_TEXT in text:
                why = "this server lets nobody register shared memory; fix: nereid serve --allow-shm"
            elif "Unable to open shared memory" in text:
                why = f"the server cannot open it: it must see this machine's {FOLDER}, and run as this user"
            else:
                raise
            raise RequestRefused(f"{why} ({text})") from None


def sweep(
    protocol: ProtocolName,
    remaining_s: Callable[[], float],
    headers: Mapping[str, str] = {},
    kinds: Sequence[Kind] = ("system",),
) -> Flow[list[str]]:
    """Have a server let go of this user's stale regions, and remove those; returns their names.

    A region without a file is stale only if the server has its files where we have ours: otherwise it is one
    of another container.

    Args:
        protocol: that the server is checked by.
        remaining_s: how long all that is left may take; raises TimedOut.
        headers: such as the token of a server that restricts shared memory.
        kinds: whose regions.
    """
    removed: set[str] = set()
    read: set[str] = set()
    for kind in kinds:
        options = {"headers": dict(headers)} | ({"as_json": True} if protocol == "grpc" else {})
        known = yield Rpc(f"get_{kind}_shared_memory_status", remaining_s(), (), options)
        every = known.get("regions", {}) if isinstance(known, Mapping) else [each["name"] for each in known]
        names = [name for name in every if name.startswith(_prefix())]
        stale = [name for name in names if is_stale(FOLDER / name)]
        gone = [name for name in names if not (FOLDER / name).exists()] if kind == "system" else []
        if gone and (yield from _shares_files(remaining_s, headers)):
            stale += gone
        for name in stale:
            refusal = yield from _unregister(kind, name, remaining_s(), headers)
            (read if refusal else removed).add(name)
    return sorted(removed | set(remove_stale(read)))


def remove_stale(but: Collection[str] = ()) -> list[str]:
    """Remove the files of this user's stale regions, `but` some; returns their names."""
    removed = []
    for path in sorted(FOLDER.glob(f"{_prefix()}*")):
        if path.name not in but:
            with _locked_if_stale(path) as is_ours:
                if is_ours:
                    path.unlink(missing_ok=True)
                    removed.append(path.name)
    return removed


def is_stale(path: Path) -> bool:
    """Tell whether a region's file is there, and its owner gone."""
    with _locked_if_stale(path) as is_ours:
        return is_ours


@contextlib.contextmanager
def _locked_if_stale(path: Path) -> Iterator[bool]:
    """Lock a region's file if its owner is gone; gives whether it is. One that is being made waits for it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield False
        return
    try:
        status = os.fstat(handle)
        is_ours = status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode)
        if is_ours:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                is_ours = False
        yield is_ours
    finally:
        os.close(handle)


def cuda_library() -> Any:
    """Return tritonclient's module for CUDA shared memory.

    Raises:
        NoCuda: there is no GPU, or no library for it.
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


def _unregister(
    kind: Kind, name: str, timeout_s: float, headers: Mapping[str, str] = {}
) -> Flow[ClassifierError | None]:
    """Have a server let go of a region; returns why it does not."""
    options = {"headers": dict(headers)} if headers else {}
    try:
        yield Rpc(f"unregister_{kind}_shared_memory", timeout_s, (name,), options)
    except ClassifierError as error:
        return error
    return None


def _is_in_use(refusal: ClassifierError | None) -> bool:
    """Tell whether a server still reads a region that it was to let go of."""
    return IN_USE in str(refusal)


def _shares_files(remaining_s: Callable[[], float], headers: Mapping[str, str]) -> Flow[bool]:
    """Tell whether a server can open a file of this process."""
    try:
        file = _LockedFile(1)
    except OSError:
        return False
    options = {"headers": dict(headers)} if headers else {}
    try:
        about = file.name, f"/{file.name}", 1
        yield Rpc("register_system_shared_memory", remaining_s(), about, options)
        yield from _unregister("system", file.name, remaining_s(), headers)
    except ClassifierError:
        return False
    finally:
        file.remove()
    return True


def _leave_to_parent() -> None:
    for regions in _OPEN:
        regions.forked()


def _one(call: Rpc) -> Flow[Any]:
    return (yield call)


def _prefix() -> str:
    return f"nereid-{os.getuid()}-"


os.register_at_fork(after_in_child=_leave_to_parent)
