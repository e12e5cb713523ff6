"""A process that fills the memory of the first GPU until its input is closed.

A process of its own, because a CUDA context takes memory, too.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Memory that the filled GPU has left, and the sizes of the pieces that fill it.
LEFT_BYTES, PIECE_BYTES, LARGEST_PIECE_BYTES = 16 * 2**20, 4 * 2**20, 2**30


@contextmanager
def full_gpu(words: tuple[str, ...] = (sys.executable, "-m", __name__)) -> Iterator[int]:
    """Take the free memory of the first GPU but for `LEFT_BYTES`; gives the number of bytes.

    Raises:
        RuntimeError: the process failed; its output is in the log of the section.
    """
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise RuntimeError("the process that fills the GPU failed")
        try:
            yield int(line)
        finally:
            process.stdin.close()
            process.wait()


def main() -> int:
    """Fill the GPU, print the number of bytes, and wait for the end of the input."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    import cupy

    cupy.cuda.Device(0).synchronize()
    held, size = [], LARGEST_PIECE_BYTES
    while size >= PIECE_BYTES:
        if cupy.cuda.runtime.memGetInfo()[0] - size < LEFT_BYTES:
            size //= 2
            continue
        try:
            held.append(cupy.cuda.Memory(size))
        except (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError):
            size //= 2
    print(sum(each.size for each in held), flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
