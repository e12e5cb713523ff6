"""What several layers of tests share: paths, the clock, and the order of tests."""

import contextlib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# How fast an example runs says nothing on a busy machine.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

ROOT = Path(__file__).resolve().parent.parent
# Servers started once per session, the costliest first: the tests that use one run in the same process.
SHARED_SERVERS = ("both_profiles", "text_server")
# Number of parts of similar duration that nightly tests are split into; NIGHTLY_PART selects one, from 1.
NIGHTLY_PARTS = 4
BEGAN_S = pytest.StashKey[float]()
# How to turn stored pixels upright. Source: CIPA DC-008, 4.6.4: where the stored row 0 and column 0 are seen.
UPRIGHT = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored.swapaxes(0, 1)[::-1, ::-1],
    8: lambda stored: np.rot90(stored, 1),
}


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note when the run began, so that it removes only what it left; let Ctrl-C reach what tests start."""
    session.config.stash[BEGAN_S] = time.time()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Group tests by their server, begin with the longest group, and keep one part of the nightly ones."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    yield  # pytest-xdist reads the groups, and -m deselects
    minutes: dict[str, float] = {}
    for item in items:
        minutes[_group(item)] = max(_minutes(item), minutes.get(_group(item), 0))
    items.sort(key=lambda item: (-minutes[_group(item)], _group(item) not in SHARED_SERVERS))
    if part := os.environ.get("NIGHTLY_PART"):
        nightly = {item: _group(item) for item in items if item.get_closest_marker("nightly")}
        chosen = deal({group: minutes[group] for group in nightly.values()})[int(part) - 1]
        left_out = {item for item, group in nightly.items() if group not in chosen}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _group(item: pytest.Item) -> str:
    """Return the shared server of a test, or its file."""
    fixtures = getattr(item, "fixturenames", ())
    shared = (name for name in SHARED_SERVERS if name in fixtures)
    return next(shared, f"{item.path.parent.name}_{item.path.stem}")


def _minutes(item: pytest.Item) -> float:
    """Return what the marks of a test say of its group's duration on two cores."""
    marks = [*item.iter_markers("slow"), *item.iter_markers("nightly")]
    return max((mark.kwargs.get("minutes", 0.5) for mark in marks), default=0)


def deal(minutes: dict[str, float]) -> list[set[str]]:
    """Split groups into parts of about the same duration."""
    parts: list[set[str]] = [set() for _ in range(NIGHTLY_PARTS)]
    for name in sorted(minutes, key=lambda name: (-minutes[name], name)):
        min(parts, key=lambda part: sum(minutes[group] for group in part)).add(name)
    return parts


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove empty folders of killed servers: Triton 24.10 makes them at a path that nobody can choose."""
    if hasattr(session.config, "workerinput") or _is_serving():
        return
    for folder in Path("/tmp").glob("python_env_*"):
        with contextlib.suppress(OSError):  # not empty, or somebody else's
            if folder.stat().st_mtime >= session.config.stash[BEGAN_S]:
                folder.rmdir()


def _is_serving() -> bool:
    """Say whether any Triton server runs, which may own such a folder."""
    for name in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if name.read_text() == "tritonserver\n":
                return True
    return False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List why tests were skipped; SKIPPED_FILE gets their names, to run them elsewhere."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("skipped tests, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5} {reason}")
    if target := os.environ.get("SKIPPED_FILE"):
        # pytest-xdist adds @GROUP to a name.
        names = dict.fromkeys(re.sub(r"@\w+$", "", report.nodeid) for report in skipped)
        Path(target).write_text("".join(f"{name}\n" for name in names))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


class FakeClock:
    """A clock that only the test moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
