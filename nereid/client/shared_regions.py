"""Regions of shared memory on this machine, and the removal of stale ones. No server.

A region is a file `/dev/shm/nereid-UID-RANDOM` that its owner keeps locked. The kernel releases the lock when
the owner ends, so a file without a lock is stale.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

Kind = Literal["system", "cuda"]
FOLDER = Path("/dev/shm")
# The GPU of all CUDA regions.
DEVICE = 0


class NoCuda(RuntimeError):
    """CUDA shared memory does not work on this machine; the message names the fix."""


class LockedFile:
    """A locked file of this process in shared memory, under a random name."""

    def __init__(self, byte_size: int) -> None:
        while True:
            self.name = f"{name_prefix()}{secrets.token_hex(8)}"
            self._path = FOLDER / self.name
            self.handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(self.handle, fcntl.LOCK_EX)
                if byte_size:
                    # Reserved now: a write to memory that the kernel cannot provide kills this process.
                    os.posix_fallocate(self.handle, 0, byte_size)
            except OSError as error:
                self._path.unlink(missing_ok=True)
                os.close(self.handle)
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            if self._path.exists():
                return
            os.close(self.handle)  # a sweep came before the lock

    def unlink(self) -> None:
        """Remove the file; its content stays while a process has it open."""
        self._path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Release the lock, and leave the file to a sweep."""
        os.close(self.handle)

    def remove(self) -> None:
        """Remove the file, then release the lock."""
        self.unlink()
        self.leave()


class Region(LockedFile):
    """System shared memory that a server can read while it `is_registered` there.

    Attributes:
        name: name of the region on the server, and of its file.
        byte_size: size in bytes.
        may_be_registered: a registration was sent, perhaps without a response.
        is_registered: the server has confirmed the registration.
        is_in_flight: a request that uses the region was sent, and has no response.
    """

    may_be_registered = is_registered = is_in_flight = False

    def __init__(self, byte_size: int) -> None:
        super().__init__(byte_size)
        self.byte_size = byte_size
        self._memory: Any = mmap.mmap(self.handle, byte_size)

    def write(self, content: Sequence[bytes]) -> None:
        """Write parts one after the other, from the start of the region."""
        self._memory.seek(0)
        for part in content:
            self._memory.write(part)

    def registration(self) -> tuple[Any, ...]:
        """Return the arguments of tritonclient's method of registration."""
        return self.name, f"/{self.name}", self.byte_size

    def leave(self) -> None:
        """Close the region here, and leave its file to a sweep."""
        self._memory.close()
        super().leave()


class CudaRegion(Region):
    """Memory of the first GPU, which ends with this process; its empty file exists only for a sweep."""

    def __init__(self, byte_size: int) -> None:
        self._cuda = cuda_library()
        LockedFile.__init__(self, 0)
        self.byte_size = byte_size
        try:
            self._memory = self._cuda.create_shared_memory_region(self.name, byte_size, DEVICE)
        except self._cuda.CudaSharedMemoryException as error:
            LockedFile.unlink(self)
            LockedFile.leave(self)
            raise OSError(errno.ENOMEM, f"no memory of GPU {DEVICE}: {error}") from None

    def write(self, content: Sequence[bytes]) -> None:
        """Write parts one after the other, from the start of the region."""
        self._cuda.set_shared_memory_region(self._memory, [np.frombuffer(b"".join(content), np.uint8)])

    def registration(self) -> tuple[Any, ...]:
        """Return the arguments of tritonclient's method of registration."""
        return self.name, self._cuda.get_raw_handle(self._memory), DEVICE, self.byte_size

    def unlink(self) -> None:
        """Do nothing: the server opens no file for it."""

    def leave(self) -> None:
        """Release the lock; the server may use the memory while this process lives."""
        LockedFile.leave(self)

    def remove(self) -> None:
        """Free the memory, and remove the file."""
        self._cuda.destroy_shared_memory_region(self._memory)
        LockedFile.unlink(self)
        LockedFile.leave(self)


MAKERS: dict[Kind, Callable[[int], Region]] = {"system": Region, "cuda": CudaRegion}


def name_prefix() -> str:
    """Return the start of the names of this user's regions."""
    return f"nereid-{os.getuid()}-"


def remove_stale(keep: Collection[str] = ()) -> list[str]:
    """Remove the files of this user's stale regions, except `keep`; return their names."""
    removed = []
    for path in sorted(FOLDER.glob(f"{name_prefix()}*")):
        if path.name not in keep:
            with _locked_if_stale(path) as is_locked:
                if is_locked:
                    path.unlink(missing_ok=True)
                    removed.append(path.name)
    return removed


def is_stale(path: Path) -> bool:
    """Return whether a region's file exists and its owner has ended."""
    with _locked_if_stale(path) as is_locked:
        return is_locked


@contextlib.contextmanager
def _locked_if_stale(path: Path) -> Iterator[bool]:
    """Lock a region's file if its owner has ended; yield whether it has.

    The owner of a new file waits for this lock, and then creates another file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield False
        return
    try:
        status = os.fstat(handle)
        is_locked = status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode)
        if is_locked:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                is_locked = False
        yield is_locked
    finally:
        os.close(handle)


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
