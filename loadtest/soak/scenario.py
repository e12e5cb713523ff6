"""The scenario of a soak: its traffic and its changes."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest import servers
from loadtest.soak import invalid_requests, valid_requests
from loadtest.soak.changes import Changes
from loadtest.soak.observation import POLL_S
from loadtest.soak.traffic import Kind, Tally, Target, Traffic
from loadtest.soak.valid_requests import Photo
from loadtest.swap import References
from nereid.tune import photos

# The short effects of a change end within this time.
SETTLING_S = 2.0


@dataclass(frozen=True, slots=True)
class Played:
    """The outcome: `calm` has the spans without changes, in monotonic seconds; the first one is the longest.

    `trouble` has the reason of an early end.
    """

    tallies: Sequence[Tally]
    calm: Sequence[tuple[float, float]]
    trouble: Sequence[str]


@dataclass(frozen=True, slots=True)
class Scenario:
    """The traffic and the changes of a soak."""

    kinds: Sequence[Kind]
    target: Target
    changes: Changes

    @classmethod
    def of(cls, running: servers.Supervised, gateway: servers.Gateway, folder: Path) -> "Scenario":
        """Prepare photos, candidates and expected scores."""
        files = {name: photos.jpeg(size_wh) for name, size_wh in photos.SIZES_WH.items()}
        known = {name: Photo(file, References(running.repository, [file])) for name, file in files.items()}
        server = running.record
        return cls(
            [*valid_requests.kinds(known), *invalid_requests.kinds(files[valid_requests.LARGE])],
            Target(server.url("http"), server.url("grpc"), f"127.0.0.1:{gateway.port}"),
            Changes(running, folder, [each.references for each in known.values()]),
        )

    def warming(self) -> "Scenario":
        """Return the scenario with the rates of the warm-up."""
        return replace(self, kinds=[kind.warming() for kind in self.kinds])

    def play(
        self,
        seconds: float,
        calm_s: float,
        steady_s: float,
        has_enough: Callable[[float], bool] = lambda since_s: True,
        is_over: Callable[[], object] = lambda: False,
    ) -> Played:
        """Run traffic, then with changes every `calm_s`, until the end or a failed change.

        Args:
            seconds: duration.
            calm_s: from the end of one round of changes to the next.
            steady_s: duration before the first change.
            has_enough: whether there are enough samples since a time; the first and last span wait for them.
            is_over: whether no more samples will come.
        """
        calm: list[tuple[float, float]] = []
        trouble: list[str] = []
        with Traffic(self.kinds, self.target) as traffic, noted(trouble, "a change failed"):
            deadline = time.monotonic() + seconds
            while not is_over():
                began_s = time.monotonic()
                _sleep(calm_s if calm else steady_s, is_over)
                is_last = time.monotonic() > deadline
                while (is_last or not calm) and not has_enough(began_s + SETTLING_S):
                    time.sleep(POLL_S)
                calm.append((began_s + SETTLING_S, time.monotonic()))
                if is_last:
                    break
                self.changes.cycle()
        return Played(traffic.tallies, calm, trouble)


def _sleep(seconds: float, is_over: Callable[[], object]) -> None:
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0 and not is_over():
        time.sleep(min(left_s, POLL_S))


@contextmanager
def noted(trouble: list[str], event: str) -> Iterator[None]:
    """Note an error as text, so that earlier observations are kept."""
    try:
        yield
    except Exception as error:
        trouble.append(f"{event}: {type(error).__name__}: {error}")
