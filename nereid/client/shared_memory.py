"""Images passed to a server of the same machine in shared memory: a request only refers to them.

A server may read a region for longer than its owner waits for the response. The owner then stops using the
region, and removes it after the server has released it. Triton 24.10 refuses to release a region that it
still reads.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nereid.client import shared_regions, transport
from nereid.client.classifier_errors import ClassifierError, TimedOut, Unreachable, is_final, is_refusal
from nereid.client.request import ProtocolName, region_tensor
from nereid.client.retry import Attempts
from nereid.client.sans_io import Flow, Rpc
from nereid.client.shared_regions import Kind, Region, cuda_library, name_prefix
from nereid.contract import RESTRICTED_TEXT

MIN_REGION_BYTES = 2**20
# Texts of Triton: it reads a region, and does not release it; it has no such file, or may not read it.
IN_USE_TEXT, NO_FILE_TEXT = "currently in use", "Unable to open shared memory"
# Seconds between two attempts to release a region: with requests, and in `close`.
RELEASE_RETRY_S, CLOSE_RETRY_S = 1.0, 0.05
# Time limit of each RPC in `close`, and of the wait for a server that reads.
CLOSE_S = 2.0
NO_RESPONSE = (TimedOut, Unreachable)


class SharedMemoryRefused(Exception):
    """The server or this machine has no shared memory for a request, which the server has not run."""


# Open in this process; a fork leaves them to its parent.
_OPEN: "weakref.WeakSet[Regions]" = weakref.WeakSet()


class Regions:
    """The regions of one classifier: one for each request in flight, kept for later requests.

    Args:
        kind: `system`, or `cuda` for memory of the first GPU.
        url: address of the server, HOST:PORT.
        protocol: protocol of the connection.
        clock: monotonic clock, in seconds.

    Raises:
        NoCuda: the machine has no GPU, or a library is missing.
    """

    def __init__(
        self,
        kind: Kind,
        url: str,
        protocol: ProtocolName,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if kind == "cuda":
            cuda_library()
        self._kind, self._url, self._protocol = kind, url, protocol
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[Region] = []
        self._lent: list[Region] = []
        # Regions that no request uses again, each with the time of its next release attempt.
        self._retired: list[tuple[float, Region]] = []
        self._is_swept = self._is_closed = False
        _OPEN.add(self)

    def infer(self, files: Sequence[bytes], attempts: Attempts, make_rpc: Callable[[Any], Rpc]) -> Flow[Any]:
        """Write images to a region, and return the result of a request that refers to it.

        Args:
            files: images of one request.
            attempts: time limit of the request.
            make_rpc: builds the RPC from its input tensor.

        Raises:
            ClassifierError: the RPC failed.
            SharedMemoryRefused: the server refuses the region, or this machine has no room for it.
            RuntimeError: the classifier is closed.
        """
        self._check_open()
        if not self._is_swept:
            try:
                yield from sweep(self._protocol, attempts.remaining_s, kinds=(self._kind,))
            except ClassifierError as error:
                raise _refusal(error) from None
            self._is_swept = True
        yield from self._release_retired(attempts)
        content = [part for file in files for part in (len(file).to_bytes(4, "little"), file)]
        byte_size = sum(map(len, content))
        region = self._take(byte_size)
        try:
            region.write(content)
            tensor = region_tensor(self._protocol, len(files), region.name, byte_size)
            result = yield from self._infer_from(region, attempts, lambda: make_rpc(tensor))
        except BaseException as error:
            self._return(region, error)
            raise
        self._return(region, None)
        return result

    def close(self) -> None:
        """Release the regions on the server, and remove them.

        A later sweep removes regions that are in use, and regions that the server reads for two more seconds.
        """
        with self._lock:
            self._is_closed = True
            regions = [*self._idle, *(region for _, region in self._retired)]
            self._idle, self._retired = [], []
        if not regions:
            return
        connection = transport.Connection(self._url, self._protocol)
        deadline = time.monotonic() + CLOSE_S
        try:
            is_there = True
            for region in regions:
                refusal = None
                while is_there and region.may_be_registered:
                    refusal = transport.run(connection, self._release(region, CLOSE_S))
                    is_there = not isinstance(refusal, NO_RESPONSE)
                    if not _is_in_use(refusal) or time.monotonic() > deadline:
                        break
                    time.sleep(CLOSE_RETRY_S)
                if _is_in_use(refusal):
                    region.leave()
                else:
                    region.remove()
        finally:
            connection.close()

    def forked(self) -> None:
        """Leave all regions to the parent of this fork."""
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
            region = shared_regions.MAKERS[self._kind](
                max(MIN_REGION_BYTES, 1 << (byte_size - 1).bit_length())
            )
        except OSError as error:
            raise SharedMemoryRefused(str(error)) from None
        with self._lock:
            self._lent.append(region)
        return region

    def _return(self, region: Region, error: BaseException | None) -> None:
        """Keep a region for the next request, or retire it: the server may still read it."""
        with self._lock:
            if region not in self._lent:  # a fork has copied the request
                return
            self._lent.remove(region)
            is_free = not region.is_in_flight or error is None or is_final(error)
            if not region.may_be_registered:  # the server has refused it
                region.remove()
            elif self._is_closed or not (region.is_registered and is_free):
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
        """Release a region that may be registered; return the server's refusal, if any."""
        if not region.is_registered:
            # The server may handle the late registration after this, and must not find the file then.
            region.unlink()
        return (yield from _unregister(self._kind, region.name, timeout_s))

    def _infer_from(self, region: Region, attempts: Attempts, make_rpc: Callable[[], Rpc]) -> Flow[Any]:
        yield from self._register(region, attempts)
        region.is_in_flight = True
        try:
            return (yield make_rpc())
        except ClassifierError as error:
            if region.name not in str(error):
                raise
        # The server has lost the region, as after a restart.
        region.is_registered = region.is_in_flight = False
        yield from self._register(region, attempts)
        region.is_in_flight = True
        try:
            return (yield make_rpc())
        except ClassifierError as error:
            if region.name not in str(error):
                raise
            region.is_in_flight = False
            # Several servers behind one address: none of them has the regions of the others.
            raise SharedMemoryRefused(f"the server does not keep its regions ({error})") from None

    def _register(self, region: Region, attempts: Attempts) -> Flow[None]:
        if region.is_registered:
            return
        name = f"register_{self._kind}_shared_memory"
        region.may_be_registered = True
        try:
            yield Rpc(name, attempts.remaining_s(), region.registration())
        except ClassifierError as error:
            if "already in manager" not in str(error):  # an earlier response was lost
                region.may_be_registered = not (is_final(error) or NO_FILE_TEXT in str(error))
                raise _refusal(error) from None
        region.is_registered = True


def _refusal(error: ClassifierError) -> ClassifierError | SharedMemoryRefused:
    """Return the refusal of shared memory in a response, with its fix; else the error itself."""
    if not is_refusal(error):
        return error
    text = str(error)
    if RESTRICTED_TEXT in text:
        what = "this server does not allow shared memory; fix: nereid serve --allow-shm"
    elif NO_FILE_TEXT in text:
        needs = f"this machine's {shared_regions.FOLDER}, and this user"
        what = f"the server cannot open the region: it needs {needs}"
    else:
        what = "the server refuses shared memory, as gateways and proxies do"
    return SharedMemoryRefused(f"{what} ({text})")


def sweep(
    protocol: ProtocolName,
    remaining_s: Callable[[], float],
    headers: Mapping[str, str] = {},
    kinds: Sequence[Kind] = ("system",),
) -> Flow[list[str]]:
    """Release this user's stale regions on a server, and remove them; return their names.

    A region without a file is stale only if the server shares its files with this process. Otherwise another
    container owns it.

    Args:
        protocol: protocol of the connection.
        remaining_s: returns the time left for all RPCs, in seconds; raises TimedOut.
        headers: headers of each RPC, such as the token of a server that restricts shared memory.
        kinds: kinds of regions.
    """
    folder = shared_regions.FOLDER
    removed: set[str] = set()
    read: set[str] = set()
    for kind in kinds:
        options = {"headers": dict(headers)} | ({"as_json": True} if protocol == "grpc" else {})
        known = yield Rpc(f"get_{kind}_shared_memory_status", remaining_s(), (), options)
        every = known.get("regions", {}) if isinstance(known, Mapping) else [each["name"] for each in known]
        names = [name for name in every if name.startswith(name_prefix())]
        stale = [name for name in names if shared_regions.is_stale(folder / name)]
        gone = [name for name in names if not (folder / name).exists()] if kind == "system" else []
        if gone and (yield from _shares_files(remaining_s, headers)):
            stale += gone
        for name in stale:
            refusal = yield from _unregister(kind, name, remaining_s(), headers)
            (read if refusal else removed).add(name)
    return sorted(removed | set(shared_regions.remove_stale(read)))


def _unregister(
    kind: Kind, name: str, timeout_s: float, headers: Mapping[str, str] = {}
) -> Flow[ClassifierError | None]:
    """Release a region on a server; return the server's refusal, if any."""
    try:
        yield Rpc(f"unregister_{kind}_shared_memory", timeout_s, (name,), {"headers": dict(headers)})
    except ClassifierError as error:
        return error
    return None


def _is_in_use(refusal: ClassifierError | None) -> bool:
    """Return whether a server refused to release a region because it reads it."""
    return IN_USE_TEXT in str(refusal)


def _shares_files(remaining_s: Callable[[], float], headers: Mapping[str, str]) -> Flow[bool]:
    """Return whether a server can open a file of this process."""
    try:
        region = Region(1)
    except OSError:
        return False
    options = {"headers": dict(headers)}
    try:
        yield Rpc("register_system_shared_memory", remaining_s(), region.registration(), options)
        yield from _unregister("system", region.name, remaining_s(), headers)
    except ClassifierError:
        return False
    finally:
        region.remove()
    return True


def _leave_to_parent() -> None:
    for regions in _OPEN:
        regions.forked()


os.register_at_fork(after_in_child=_leave_to_parent)
