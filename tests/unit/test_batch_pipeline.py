"""A pipeline of batches on a GPU, over a twin of CUDA that runs streams in any order its events allow."""

import random
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from nereid.backends.triton import batch_pipeline
from nereid.backends.triton.device_streams import DeviceStreams, FusedBatch, check_overlap
from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import DeviceFailed, InvalidConfig, InvalidImage, InvalidRequest, ServingError
from nereid.vision.imaging.image_times import ImageTimes
from tests.tables import cases

ROWS, BAD, BREAKS = 4, b"bad", b"breaks"


class Cuda:
    """A device that runs the work of its streams only when a program waits for it, in an order by chance."""

    def __init__(self, seed: int) -> None:
        self.random, self.lock, self.streams = random.Random(seed), threading.RLock(), []
        self.get_elapsed_time = lambda begin, end: 0.0

    def Stream(self, non_blocking: bool):
        stream = Stream(self)
        self.streams.append(stream)
        return stream

    def Event(self, **options):
        return Event(self)

    def run_until(self, is_over) -> None:
        """Run enqueued work, from any stream that does not wait for an event."""
        with self.lock:
            while not is_over():
                ready = [stream for stream in self.streams if stream.work and stream.work[0][0]()]
                self.random.choice(ready).work.popleft()[1]()


class Stream:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.work = cuda, deque()

    def add(self, work, is_ready=lambda: True) -> None:
        with self.cuda.lock:
            self.work.append((is_ready, work))

    def wait_event(self, event: "Event") -> None:
        target = event.recorded
        self.add(lambda: None, lambda: event.done >= target)


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.recorded, self.done = cuda, 0, 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        number = self.recorded
        stream.add(lambda: setattr(self, "done", number))

    def synchronize(self) -> None:
        target = self.recorded
        self.cuda.run_until(lambda: self.done >= target)


class Decoder:
    """Decodes `b"7"` to 7. As on a GPU, the device later reads a table that the host wrote."""

    def __init__(self, cuda: Cuda) -> None:
        self.stream, self.times = cuda.Stream(non_blocking=True), ()
        self.tables, self.tensors = np.full((2, batch_pipeline.SLOTS, ROWS), -1)

    def release(self):
        """Nothing is kept."""

    def enqueue(self, images, slot, decoded):
        if BREAKS in images:
            raise DeviceFailed("CUDA failure 700")
        self.times = [ImageTimes() for _ in images]
        self.tables[slot, : len(images)] = [-2 if image == BAD else int(image) for image in images]
        decoded.record(self.stream)
        self.stream.add(lambda: np.copyto(self.tensors[slot], self.tables[slot]))
        return [InvalidImage("bad") if image == BAD else None for image in images]


class Doubler:
    def __init__(self, cuda: Cuda, tensors: np.ndarray) -> None:
        self.stream, self.tensors = cuda.Stream(non_blocking=True), tensors
        self.outputs, self.hosts = np.full((2, batch_pipeline.SLOTS, ROWS), -3)

    def enqueue(self, slot, rows):
        self.stream.add(lambda: np.multiply(self.tensors[slot], 2, out=self.outputs[slot]))

    def fetch(self, slot, rows, stream):
        stream.add(lambda: np.copyto(self.hosts[slot], self.outputs[slot]))
        return {"y": self.hosts[slot, :rows]}


class Batch:
    def __init__(self, images, answered: list) -> None:
        self.images, self.answers, self._answered, self.errors = images, [], answered, ()

    def on_prepared(self, errors, times):
        self.errors = errors

    def answer(self, outputs, stages):
        if isinstance(outputs, dict):
            outputs = {name: array.tolist() for name, array in outputs.items()}
        self.answers.append(outputs)
        self._answered.append(self)


def device(seed: int) -> DeviceStreams:
    cuda = Cuda(seed)
    decoder = Decoder(cuda)
    network = Doubler(cuda, decoder.tensors)
    return DeviceStreams(cuda, decoder, network, network.stream, batch_pipeline.SLOTS)


def expected(batch: Batch):
    good = [image for image in batch.images if image != BAD]
    return {"y": [-4 if image == BAD else 2 * int(image) for image in batch.images]} if good else {}


def run(batches, seed: int = 0, on_broken=print) -> tuple[list[Batch], list[Batch]]:
    """Run batches of images; return them in their order, and in the order of their answers."""
    made, answered = batch_pipeline.BatchPipeline(lambda: device(seed), on_broken), []
    jobs = [Batch(images, answered) for images in batches]
    for job in jobs:
        made.submit(job)
    made.close()
    return jobs, answered


@pytest.mark.parametrize("seed", range(30))
def test_every_batch_has_its_own_results(seed):
    numbers = random.Random(seed)
    batches = [
        [b"%d" % (100 * i + j) if numbers.random() < 0.8 else BAD for j in range(numbers.randint(1, ROWS))]
        for i in range(12)
    ]

    jobs, answered = run(batches, seed)

    assert [job.answers for job in jobs] == [[expected(job)] for job in jobs]
    assert answered == jobs


def test_broken_device_fails_this_batch_and_all_later_ones():
    reasons = []

    jobs, _ = run([[b"1"], [BREAKS], [b"2"]], on_broken=reasons.append)

    assert reasons == ["CUDA failure 700"]
    assert [str(job.answers[0]) for job in jobs[1:]] == ["unavailable: device failed: CUDA failure 700"] * 2
    assert jobs[0].answers == [{"y": [2]}]


def test_failed_batch_does_not_fail_later_ones():
    jobs, _ = run([[b"x"], [b"1"], [b"2"], [b"3"]])

    assert "invalid literal" in str(jobs[0].answers[0])
    assert [job.answers for job in jobs[1:]] == [[{"y": [2 * number]}] for number in (1, 2, 3)]


class Rows:
    def finish(self, batch, images, outputs):
        y = outputs.get("y")
        return [{"y": y[rows].tolist()} if isinstance(rows, slice) else rows for rows in batch.outcomes]


def run_alone(requests, seed: int = 0):
    ran = []
    job = FusedBatch(requests, Rows(), None, lambda seconds, rows: ran.append(rows))
    return job.outcomes(*job.run(device(seed))), ran


@pytest.mark.parametrize("seed", range(5))
def test_each_request_of_a_batch_gets_its_rows(seed):
    refused, bad = InvalidRequest("two images"), InvalidImage("bad")

    outcomes, ran = run_alone([[b"1", b"2"], refused, [BAD], [b"3"]], seed)

    assert [outcomes[0], outcomes[3]] == [{"y": [2, 4]}, {"y": [6]}]
    assert [str(outcome) for outcome in outcomes[1:3]] == [str(refused), str(bad)]
    assert ran == [3]


@cases("requests", bad=[[BAD], [BAD]], refused=[InvalidRequest("no")], none=[])
def test_batch_without_good_images_is_not_computed(requests):
    outcomes, ran = run_alone(requests)

    assert [isinstance(outcome, ServingError) for outcome in outcomes] == [True] * len(requests)
    assert ran == []


def test_broken_device_fails_requests_that_have_no_error_of_their_own():
    outcomes, _ = run_alone([[b"1"], InvalidRequest("no"), [BREAKS]])

    assert [type(outcome) for outcome in outcomes] == [DeviceFailed, InvalidRequest, DeviceFailed]


def test_overlap_is_never_ignored():
    config = ModelConfig.from_document({"name": "m"}, Path("m"), 1)

    check_overlap(config, is_bound=True)
    message = r"'m', overlap_batches: expected .* on a GPU.*fix: remove overlap"
    with pytest.raises(InvalidConfig, match=message):
        check_overlap(config, is_bound=False)


def test_failure_to_open_is_raised():
    def fail() -> DeviceStreams:
        raise ValueError("no graph")

    with pytest.raises(ValueError, match="no graph"):
        batch_pipeline.BatchPipeline(fail, print)


def test_batches_get_slots_in_their_order():
    """A batch whose images are all bad is answered without a run."""
    slots = batch_pipeline.SlotScheduler(2)
    assert slots.on_submitted(0) == [batch_pipeline.Decode(0, 0)]
    assert [slots.on_submitted(batch) for batch in (1, 2, 3)] == [[], [], []]

    assert slots.on_decoded(0, 0) == [batch_pipeline.Respond(0), batch_pipeline.Decode(1, 1)]
    assert slots.on_answered(0) == []
    assert slots.on_decoded(1, 2) == [batch_pipeline.Compute(1, 2), batch_pipeline.Decode(0, 2)]
    assert slots.on_computed(1) == [batch_pipeline.Respond(1)]
    assert slots.on_answered(1) == []
    assert slots.on_decoded(0, 1) == [batch_pipeline.Compute(0, 1), batch_pipeline.Decode(1, 3)]
    assert not slots.is_idle
