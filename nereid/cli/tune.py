"""`nereid tune`: look for better settings, say what was found, and write it if it is worth it."""

import datetime
import importlib.util
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from nereid import ending
from nereid.cli.classify import collect
from nereid.cli.tune_report import Report
from nereid.errors import OperationFailed, WrongUsage
from nereid.processes import available_cores, cpu_model
from nereid.server.embedded import ServerError
from nereid.tune import profiles, space
from nereid.tune.objective import Kind, Objective
from nereid.tune.profiles import Tunable
from nereid.tune.search import NotMeasured, Search

NEEDED = ("uvloop", "httptools")
CONCURRENCIES = (1, 8, 32)
# What is left of the time for the server to end.
STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for.

    Args:
        repository, model, profile: what is tuned, and the profile to start from.
        kind, p99_ms: the objective.
        minutes: for all of it.
        concurrencies: of the load; 1 is always among them.
        images: files, or folders of them; none for the sample photo.
        seed: of the candidates that are drawn.
        is_dry: measure, and write nothing.
    """

    repository: Path
    model: str
    profile: str
    kind: Kind = "throughput"
    p99_ms: float | None = None
    minutes: float = 5.0
    concurrencies: Sequence[int] = CONCURRENCIES
    images: Sequence[Path] = ()
    seed: int = 0
    is_dry: bool = False

    @property
    def command(self) -> str:
        """The command line that asks for the same."""
        words = ["nereid", "tune", self.model, "--objective", self.kind]
        words += ["--p99-ms", f"{self.p99_ms:g}"] if self.p99_ms else []
        words += ["--minutes", f"{self.minutes:g}", "--profile", self.profile, "--seed", str(self.seed)]
        words += ["--concurrency", ",".join(map(str, self.concurrencies))]
        for path in self.images:
            words += ["--images", str(path)]
        words += ["--repository", str(self.repository)]
        return shlex.join(words)

    @property
    def objective(self) -> Objective:
        """What is best."""
        return Objective(self.kind, self.p99_ms or float("inf"))


def tune(wish: Wish, environment: Mapping[str, str], as_json: bool) -> None:
    """Search, print, and write the profile if the gain is larger than the noise.

    Raises:
        WrongUsage: the model cannot be tuned.
        OperationFailed: it cannot be served, nothing meets the p99, or a package is missing.
    """
    if missing := [name for name in NEEDED if not importlib.util.find_spec(name)]:
        raise OperationFailed(
            f"the load needs {' and '.join(missing)}; fix: pip install 'nereid-serving[load]'"
        )
    tuned = profiles.tunable(wish.repository, wish.model, wish.profile)
    if not wish.is_dry:
        profiles.check_writable(wish.repository, tuned)
    for note in tuned.notes:
        tell(f"note: {note}")
    try:
        with ending.tidy():
            report = search(wish, tuned, environment)
    except (NotMeasured, ServerError) as error:
        raise OperationFailed(f"'{wish.model}' cannot be measured as it is: {error}") from None
    written: list[str] = []
    if not as_json:
        report.show(Console(width=max(100, Console().width)))
    try:
        if report.verdict == "better" and not wish.is_dry:
            written = write(wish, tuned, report)
        if report.verdict == "infeasible":
            raise OperationFailed(report.reason())
    finally:  # what was measured is told, whatever becomes of it
        if as_json:
            print(json.dumps(report.document() | {"written": written}, indent=2))
        elif report.verdict != "infeasible":
            print(report.reason())
    if not as_json:
        print(_outcome(wish, written))


def _outcome(wish: Wish, written: Sequence[str]) -> str:
    if not written:
        return "nothing is written"
    models = ", ".join(written)
    return f"profile '{profiles.TUNED}' written for {models}: nereid serve --profile {profiles.TUNED}"


def search(wish: Wish, tuned: Tunable, environment: Mapping[str, str]) -> Report:
    """Measure on a server of its own until the time is over.

    Raises:
        WrongUsage: there are no such images.
        NotMeasured: the config as it is cannot be.
        ServerError: the server cannot be started.
    """
    # Here, because it needs the packages of the extra `load`.
    from nereid.tune.trial import TrialServer

    photos = _read(wish.images)
    deadline_s = time.monotonic() + 60 * wish.minutes - STOP_S
    concurrencies = sorted({1, *wish.concurrencies})
    cores = available_cores()
    with tempfile.TemporaryDirectory(prefix="nereid-tune-") as folder:
        repository = wish.repository.resolve()
        with TrialServer(
            repository, tuned, photos, concurrencies, Path(folder), environment, deadline_s
        ) as trial:
            config = trial.served()
            grid = space.space(config, tuned.backend, cores)
            points, default = list(space.points(grid, cores)), space.present(grid, config)
            tell(f"{len(points)} points: " + "; ".join(f"{name} {_listed(v)}" for name, v in grid.items()))
            searching = Search(
                trial.measure, wish.objective, len(concurrencies), time.monotonic, deadline_s, tell
            )
            best, duel = searching.run(
                lambda count: space.sample(points, grid, count, wish.seed, without=default)
            )
    for candidate, reason in searching.refused.items():
        tell(f"not measured: {dict(candidate)}: {reason}")
    return Report(wish.model, wish.objective, default, best, duel, searching.seen, searching.refused)


def _read(images: Sequence[Path]) -> list[bytes]:
    try:
        return [path.read_bytes() for path in collect(images)]
    except ValueError as error:
        raise WrongUsage(str(error)) from None


def write(wish: Wish, tuned: Tunable, report: Report) -> list[str]:
    """Write the profile; returns the models in it."""
    for model in profiles.overwritten(wish.repository, tuned):
        tell(f"note: what was tuned of '{model}' is replaced; --profile {profiles.TUNED} goes on from it")
    now = datetime.datetime.now(datetime.UTC)
    about = [f"{now:%Y-%m-%d %H:%M} UTC, {cpu_model()}, {available_cores()} cores.", report.reason()]
    changed = {name: value for name, value in report.best if (name, value) not in report.default}
    return profiles.write(wish.repository, tuned, changed, wish.command, about)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def tell(line: str) -> None:
    """Write a line about the progress."""
    print(line, file=sys.stderr, flush=True)


def concurrencies(text: str | None) -> tuple[int, ...] | None:
    """Read a list with commas; None where nothing was asked for.

    Raises:
        ValueError: a number is none of callers.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise ValueError(f"concurrency must be whole numbers from 1 on, got '{word}'")
    return tuple(dict.fromkeys(map(int, words)))
