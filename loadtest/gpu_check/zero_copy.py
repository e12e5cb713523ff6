"""One address from preprocessing to network, and a trace of CUDA without copies to the host."""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadtest.gpu_check import chain, traces
from loadtest.gpu_check.sections import Context, Findings
from nereid.tune import photos

ROWS, BATCHES = 32, 20
# Bytes of one row of the tensor; a status word of the decoder is far smaller.
ROW_BYTES = 3 * 224 * 224 * 4


def measure(context: Context) -> Iterator[Findings]:
    """Yield the addresses and the traced copies."""
    work = Work()
    yield {"addresses": work.addresses()}
    yield {"scores_on_gpu": work.scores_on_gpu()}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", __name__]
        tracer, copies = traces.trace(work.run, words, Path(folder))
    to_host = copies.get(traces.TO_HOST, {"count": 0, "bytes": 0})
    yield {"tracer": tracer, "batches": BATCHES, "rows": ROWS, "copies": copies, "to_host": to_host}


def rehearse(context: Context) -> Iterator[Findings]:
    """Yield the configs of both models: each is for an instance on the GPU, and takes tensors there."""
    network = chain.gpu_config(chain.NETWORK)
    yield {
        "row_bytes": ROW_BYTES,
        "instances": {name: groups(name) for name in (chain.PREPROCESS, chain.NETWORK)},
        "force_cpu_only_input_tensors": network.parameters.get("FORCE_CPU_ONLY_INPUT_TENSORS"),
    }


def groups(model: str) -> Sequence[str]:
    """Return the kinds of a model's instance groups in the profile `gpu`."""
    return [str(group.get("kind")) for group in chain.gpu_config(model).document["instance_group"]]


class Work:
    """The traced work, after all allocations and compilations: batches from JPEG to scores."""

    def __init__(self) -> None:
        self._chain = chain.Chain(ROWS)
        self._images = [photos.jpeg(photos.SIZES_WH["640x427"])] * ROWS
        for _ in range(chain.WARM_UP_CALLS):
            self._chain.run(self._images)

    def run(self) -> None:
        """Run the batches, and wait for the GPU."""
        import cupy

        for _ in range(BATCHES):
            self._chain.run(self._images)
        cupy.cuda.Device(0).synchronize()

    def addresses(self) -> dict[str, object]:
        """Compare the tensor's address after each batch with the address that the network gets."""
        tensor = self._chain.preprocessor.tensor
        first, seen = tensor.data.ptr, []
        for count in (1, 2, ROWS):
            self._chain.preprocessor.prepare(self._images[:count])
            seen.append(self._chain.input_rows(count).data.ptr)
        return {"tensor": first, "network": seen, "are_equal": set(seen) == {first}}

    def scores_on_gpu(self) -> bool:
        """Return whether the network's output is an array of CuPy."""
        import cupy

        return isinstance(self._chain.run(self._images[:1]), cupy.ndarray)


def main() -> int:
    """Run the work between cudaProfilerStart and cudaProfilerStop, for `nsys profile`."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    import cupyx.profiler

    work = Work()
    with cupyx.profiler.profile():
        work.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
