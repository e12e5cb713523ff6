"""What happens in a soak: who asks what of whom, and what changes meanwhile."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest import servers
from loadtest.soak import bad, good
from loadtest.soak.changes import Changes
from loadtest.soak.good import Photo
from loadtest.soak.traffic import Kind, Tally, Target, Traffic
from loadtest.soak.watch import LOOK_S
from loadtest.swap import References
from nereid.tune import photos

# After so long what a change leaves behind at once has gone.
SETTLING_S = 2.0


@dataclass(frozen=True, slots=True)
class Played:
    """What came of it: `calm` are the spans in which nothing changed, in monotonic seconds.

    `trouble` tells what ended it early, if anything.
    """

    tallies: Sequence[Tally]
    calm: Sequence[tuple[float, float]]
    trouble: Sequence[str]


@dataclass(frozen=True, slots=True)
class Scene:
    """Who asks what of whom, and what changes meanwhile."""

    kinds: Sequence[Kind]
    target: Target
    changes: Changes

    @classmethod
    def of(cls, running: servers.Supervised, gateway: servers.Gateway, folder: Path) -> "Scene":
        """Make the photos and what is published, and know what each version answers."""
        files = {name: photos.jpeg(size_wh) for name, size_wh in photos.SIZES_WH.items()}
        known = {name: Photo(file, References(running.repository, file)) for name, file in files.items()}
        server = running.record
        return cls(
            [*good.kinds(known), *bad.kinds(files[good.LARGE])],
            Target(server.url("http"), server.url("grpc"), f"127.0.0.1:{gateway.port}"),
            Changes(running, folder, [each.references for each in known.values()]),
        )

    def warming(self) -> "Scene":
        """Return it as it is played before anything is measured."""
        return replace(self, kinds=[kind.warming() for kind in self.kinds])

    def play(
        self,
        seconds: float,
        calm_s: float,
        has_enough: Callable[[float], bool] = lambda since_s: True,
        is_over: Callable[[], object] = lambda: False,
    ) -> Played:
        """Ask for so long, and change things every `calm_s`, until a change fails.

        Args:
            seconds: for how long.
            calm_s: from the end of one round of changes to the next.
            has_enough: of samples since a moment: the last span goes on until then, as a machine may be slow.
            is_over: whether there will be none any more.
        """
        calm: list[tuple[float, float]] = []
        trouble: list[str] = []
        with Traffic(self.kinds, self.target) as traffic, noted(trouble, "a change has failed"):
            deadline = time.monotonic() + seconds
            while not is_over():
                began_s = time.monotonic()
                time.sleep(calm_s)
                is_last = time.monotonic() > deadline
                while is_last and not has_enough(began_s + SETTLING_S):
                    time.sleep(LOOK_S)
                calm.append((began_s + SETTLING_S, time.monotonic()))
                if is_last:
                    break
                self.changes.cycle()
        return Played(traffic.tallies, calm, trouble)


@contextmanager
def noted(trouble: list[str], what: str) -> Iterator[None]:
    """Put an error into words: it must not take with it what was seen before."""
    try:
        yield
    except Exception as error:
        trouble.append(f"{what}: {type(error).__name__}: {error}")
