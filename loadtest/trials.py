"""The effect of other settings than those of the model repository on speed, CPU time and p99.

Each trial is a copy of the repository with one change, on a server of its own. A round measures all trials
in turn; odd rounds run backwards. One trial changes nothing and shows the noise.

python -m loadtest.trials [--rounds 7] [--seconds 2] [--record trials]       needs `wrk`
"""

import contextlib
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from loadtest import record, servers, wrk
from loadtest.bench.paths import Running
from loadtest.bench.summary import Sample
from nereid import assets
from nereid.server.command_line import PLAIN_PROFILE
from nereid.server.embedded_server import infer_path
from nereid.tune import photos

MODEL, NETWORK, PREPROCESS = "classify_v1", "efficientnet_lite0", "imagenet_preprocess"
CONCURRENCIES = (32, 8)
HEADINGS = ("trial", "of", "load", "images/s", "compared", "CPU ms", "compared", "p99 of even")
COLUMNS = ("trial", "base", "concurrency", "rate", "rate_compared", "cpu_ms", "cpu_compared", "p99_of_even")
BATCHES = "preferred_batch_size: [ 2, 4 ]"
# A queue needs this policy to honour the timeout of a request.
POLICY = (
    "default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 600000000 "
    "allow_timeout_override: true }"
)
# The normalisation of EfficientNet-Lite: (pixel - 127) / 128.
MEAN, STD = 127.0, 128.0


@dataclass(frozen=True, slots=True)
class Trial:
    """A profile of the repository, and the change in a copy of it; None for no change."""

    profile: str
    change: Callable[[Path], None] | None = None


def replacing(path: str, old: str, new: str) -> Callable[[Path], None]:
    """Return a change of one text in a file of the repository; the text must exist."""

    def change(repository: Path) -> None:
        text = (repository / path).read_text()
        assert old in text, f"{path} has no {old!r}"
        (repository / path).write_text(text.replace(old, new))

    return change


def all_of(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    """Combine several changes into one."""

    def change(repository: Path) -> None:
        for each in changes:
            each(repository)

    return change


def hand_over_bytes(repository: Path) -> None:
    """Change the tensor between preprocessing and network to UINT8; the network normalises."""
    old = 'name: "input" data_type: TYPE_FP32'
    for model in (PREPROCESS, NETWORK):
        for path in (repository / model).rglob("*.pbtxt"):
            path.write_text(path.read_text().replace(old, old.replace("FP32", "UINT8")))
    for version in (1, 2):
        path = repository / NETWORK / str(version) / "model.onnx"
        onnx.save(taking_bytes(onnx.load(path)), path)


def taking_bytes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a network with the input uint8[N, 3, 224, 224] in place of normalised pixels."""
    graph = model.graph
    given = graph.input[0].name
    for node in graph.node:
        node.input[:] = ["normalised" if name == given else name for name in node.input]
    graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.UINT8
    for name, value in (("pixel_mean", MEAN), ("pixel_std", STD)):
        graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
    steps = [
        helper.make_node("Cast", [given], ["pixels"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Sub", ["pixels", "pixel_mean"], ["centred"]),
        helper.make_node("Div", ["centred", "pixel_std"], ["normalised"]),
    ]
    for position, node in enumerate(steps):
        graph.node.insert(position, node)
    return model


CPU, ENSEMBLE = "cpu", PLAIN_PROFILE
_FUSED = f"{MODEL}/configs/{CPU}.pbtxt"


def batches(sizes: str) -> Callable[[Path], None]:
    """Return a change of the preferred batch sizes in profile `cpu`."""
    return replacing(_FUSED, BATCHES, BATCHES.replace("2, 4", sizes))


def instances(count: int) -> Callable[[Path], None]:
    """Return a change of the number of instances in profile `cpu`."""
    return replacing(_FUSED, "KIND_CPU }", f"KIND_CPU count: {count} }}")


_NETWORK, _PREPROCESS = f"{NETWORK}/config.pbtxt", f"{PREPROCESS}/config.pbtxt"
_RUNS = '{ string_value: "2" } }'
TRIALS: Mapping[str, Trial] = {
    CPU: Trial(CPU),
    "a queue policy": Trial(CPU, replacing(_FUSED, BATCHES, f"{BATCHES} {POLICY}")),
    "any batch up to 8": Trial(CPU, replacing(_FUSED, BATCHES, "")),
    "any batch up to 8, a queue policy": Trial(CPU, replacing(_FUSED, BATCHES, POLICY)),
    "batches of 4 and 8": Trial(CPU, batches("4, 8")),
    "batches of 2, 4 and 8": Trial(CPU, batches("2, 4, 8")),
    "batches of 2 at most": Trial(CPU, batches("2")),
    "batches of 1": Trial(CPU, batches("1")),
    "one instance": Trial(CPU, instances(1)),
    "one instance, a queue policy": Trial(
        CPU, all_of(instances(1), replacing(_FUSED, BATCHES, f"{BATCHES} {POLICY}"))
    ),
    "three instances": Trial(CPU, instances(3)),
    "runs of 4 images": Trial(CPU, replacing(_NETWORK, _RUNS, _RUNS.replace("2", "4"))),
    "runs of 8 images": Trial(CPU, replacing(_NETWORK, _RUNS, _RUNS.replace("2", "8"))),
    f"{CPU} again": Trial(CPU),
    ENSEMBLE: Trial(ENSEMBLE),
    "UINT8 handed over": Trial(ENSEMBLE, hand_over_bytes),
    "one preprocessing instance": Trial(
        ENSEMBLE, replacing(_PREPROCESS, "KIND_CPU }", "KIND_CPU count: 1 }")
    ),
    "one network instance of two threads": Trial(
        ENSEMBLE,
        all_of(
            replacing(_NETWORK, "KIND_CPU }", "KIND_CPU count: 1 }"),
            replacing(_NETWORK, '{ string_value: "1" } }', '{ string_value: "2" } }'),
        ),
    ),
    "any batches": Trial(
        ENSEMBLE, all_of(*(replacing(each, BATCHES, "") for each in (_PREPROCESS, _NETWORK)))
    ),
}


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[dict[str, Running]]:
    """Run one server for each trial."""
    with contextlib.ExitStack() as stack:
        found = {}
        for number, (name, trial) in enumerate(TRIALS.items()):
            repository = shutil.copytree(assets.REPOSITORY, folder / f"models-{number}")
            if trial.change:
                trial.change(repository)
            server = stack.enter_context(servers.served(folder, os.environ, trial.profile, repository))
            found[name] = Running(server.options.ports, (server.pid,))
        yield found


def measure(running: Running, photo: Path, concurrency: int, seconds: float) -> Sample:
    """Measure one trial at one concurrency."""
    post = partial(wrk.post, running.ports.http, infer_path(MODEL), photo, concurrency)
    return running.sample(MODEL, partial(running.flowing, MODEL, post, seconds))


def rows(series: Mapping[tuple[str, int], list[Sample]]) -> list[record.Row]:
    """Return a row per trial and concurrency: medians, and medians of the rounds' ratios."""
    found = []
    for (name, concurrency), seen in series.items():
        base = TRIALS[name].profile
        others = series[base, concurrency]
        found.append(
            {
                "trial": name,
                "base": "" if name == base else base,
                "concurrency": concurrency,
                "rate": round(statistics.median(each.rate for each in seen), 1),
                "rate_compared": _ratio("rate", seen, others),
                "cpu_ms": round(statistics.median(each.cpu_ms for each in seen), 2),
                "cpu_compared": _ratio("cpu_ms", seen, others),
                "p99_of_even": round(statistics.median(each.slack(concurrency) for each in seen), 2),
            }
        )
    return found


def _ratio(field: str, seen: list[Sample], others: list[Sample]) -> float:
    values, base = ([getattr(each, field) for each in samples] for samples in (seen, others))
    return record.median_ratio(values, base)


def markdown(found: list[record.Row]) -> str:
    """Render the rows as the table of docs/benchmarks.md."""
    return record.markdown(HEADINGS, ([row[name] for name in COLUMNS] for row in found))


def main() -> int:
    """Measure, print and record all trials."""
    args = record.parsed(record.parser(__doc__, rounds=7, seconds=2.0), wrk.missing())
    series: dict[tuple[str, int], list[Sample]] = {each: [] for each in product(TRIALS, CONCURRENCIES)}
    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch)) as running:
        photo = Path(scratch) / "photo.jpg"
        photo.write_bytes(photos.jpeg(photos.SIZES_WH["640x427"]))
        for number in range(args.rounds):
            for name, concurrency in record.turns(series, number):
                seen = measure(running[name], photo, concurrency, args.seconds)
                series[name, concurrency].append(seen)
    found = rows(series)
    print(markdown(found))
    return record.finish(args.record, {"rounds": args.rounds, "seconds": args.seconds, "rows": found})


if __name__ == "__main__":
    record.end(main)
