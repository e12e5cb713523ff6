"""The causes of the measured incidents, each of which a context lets happen to a served route under load."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loadtest import drift_photos, servers
from loadtest.alert_watch import Prometheus, Webhook
from loadtest.photo_callers import PhotoCallers
from loadtest.swap import ROUTE, slower
from nereid.drift import baseline
from nereid.drift.targets import targets_of
from nereid.processes import available_cores, end_with_parent
from nereid.publish.publisher import Gates, publish
from nereid.routes.target import find_route
from nereid.triton import stub_processes

# Multiplications with which one request takes longer than 250 ms, and the share of its variant.
WORK, SLOW_PERCENT = 1500, 25
SLOW, DYING = "v3", "classify_v2"
NORMAL = {"v1": 50, "v2": 50, SLOW: 0}
GATES = Gates(is_change_accepted=True, max_slowdown=1000, max_memory_ratio=100)
DAMAGED_SHARE = 0.3
# Between two looks for processes to kill, and busy processes for each core.
KILL_S, BUSY_PER_CORE = 1.0, 48
PHOTOS, SEED = 300, 1


@dataclass(frozen=True, slots=True)
class Photos:
    """Normal photos, and dark copies of them."""

    normal: tuple[bytes, ...]
    dark: tuple[bytes, ...]
    draw: random.Random

    @classmethod
    def crops(cls, count: int = PHOTOS) -> "Photos":
        """Return crops of the photos of three packages."""
        found = drift_photos.crops(count)
        dark = tuple(drift_photos.jpeg(drift_photos.dark(each)) for each in found)
        return cls(tuple(map(drift_photos.jpeg, found)), dark, random.Random(SEED))

    def any_normal(self) -> bytes:
        """Return a normal photo."""
        return self.draw.choice(self.normal)

    def any_dark(self) -> bytes:
        """Return a dark photo."""
        return self.draw.choice(self.dark)

    def some_damaged(self) -> bytes:
        """Return a photo, of which some are cut off after their first bytes."""
        photo = self.any_normal()
        return photo[: len(photo) // 20] if self.draw.random() < DAMAGED_SHARE else photo


@dataclass(frozen=True, slots=True)
class Scene:
    """A served route under load, with all that watches it."""

    running: servers.Supervised
    callers: PhotoCallers
    prometheus: Prometheus
    webhook: Webhook
    photos: Photos

    def nereid(self, *words: str) -> str:
        """Run a command of `nereid` for the repository, and return its output."""
        command = [sys.executable, "-m", "nereid", *words, "--repository", str(self.running.repository)]
        done = subprocess.run(
            command, env={**self.running.environment}, check=True, stdout=subprocess.PIPE, text=True
        )
        return done.stdout

    @contextlib.contextmanager
    def sending(self, photo: Callable[[], bytes]) -> Iterator[None]:
        """Let the callers send other photos."""
        before, self.callers.photo = self.callers.photo, photo
        try:
            yield
        finally:
            self.callers.photo = before


def prefer_dying(repository: Path) -> None:
    """Make the variant whose processes die the default, which no other variant replaces."""
    path = repository / f"{ROUTE}.route.json"
    route = json.loads(path.read_text())
    (route["default"],) = (each["name"] for each in route["variants"] if each["model"] == DYING)
    path.write_text(json.dumps(route))


def add_slow_version(repository: Path, folder: Path) -> None:
    """Publish a network with much more work as a variant without traffic; no server runs yet."""
    publish(repository, ROUTE, slower(folder / "candidate", WORK), None, GATES, 0)


@contextlib.contextmanager
def slow_version(scene: Scene) -> Iterator[None]:
    """Give a part of the traffic to a version whose network does much more work."""
    _weights(scene, {"v1": 50, "v2": 50 - SLOW_PERCENT, SLOW: SLOW_PERCENT})
    try:
        yield
    finally:
        _weights(scene, NORMAL)


def _weights(scene: Scene, weights: Mapping[str, int]) -> None:
    scene.nereid("route", "set", *(f"{name}={weight}" for name, weight in weights.items()))


@contextlib.contextmanager
def dying_processes(scene: Scene) -> Iterator[None]:
    """Kill the processes of a model whenever the supervisor has replaced them."""
    over = threading.Event()

    def kill() -> None:
        while True:
            for stub in stub_processes.find(scene.running.record.pid, scene.running.repository):
                if stub.model == DYING:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(stub.process.pid, signal.SIGKILL)
            if over.wait(KILL_S):
                return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def damaged_images(scene: Scene) -> contextlib.AbstractContextManager[None]:
    """Damage a part of the photos."""
    return scene.sending(scene.photos.some_damaged)


def take_reference(scene: Scene) -> None:
    """Store the reference of the variants with traffic, from the normal photos."""
    folder = scene.running.repository.parent / "photos"
    folder.mkdir()
    paths = [folder / f"{number:03}.jpg" for number in range(len(scene.photos.normal))]
    for path, photo in zip(paths, scene.photos.normal, strict=True):
        path.write_bytes(photo)
    server, repository = scene.running.record, scene.running.repository
    targets = [each for each in targets_of(find_route(repository), server.profile) if each.name != SLOW]
    found = baseline.from_images(server.url("http"), repository, ROUTE, targets, paths, print)
    baseline.store(repository, ROUTE, found)


def dark_images(scene: Scene) -> contextlib.AbstractContextManager[None]:
    """Send photos with 40 % of their light."""
    return scene.sending(scene.photos.any_dark)


@contextlib.contextmanager
def busy_loops(scene: Scene) -> Iterator[None]:
    """Run more busy processes than there are cores."""
    command = [sys.executable, "-c", "while True: pass"]
    count = BUSY_PER_CORE * available_cores()
    busy = [subprocess.Popen(command, preexec_fn=end_with_parent()) for _ in range(count)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
        for each in busy:
            each.wait()
