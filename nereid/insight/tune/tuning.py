"""A run of `nereid tune`: its options, the search on a server of its own, and the written profile."""

import datetime
import importlib.util
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nereid.base.errors import OperationFailed, ServerError
from nereid.base.processes import available_cores, cpu_model
from nereid.insight.tune import profiles, space
from nereid.insight.tune.objective import Kind, Objective
from nereid.insight.tune.profiles import Tunable
from nereid.insight.tune.report import Report
from nereid.insight.tune.search import NotMeasured, Search

PACKAGES = ("uvloop", "httptools")
CONCURRENCIES = (1, 8, 32)
# The part of the time that is reserved for stopping the server.
STOP_S = 5.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of a run.

    Args:
        repository, model, profile: the model, and the profile to start from.
        kind, p99_ms: the objective.
        minutes: duration of the whole run.
        concurrencies: numbers of requests in flight; 1 is always added.
        images: image files, or folders with images; none for the sample photo.
        seed: random seed of the candidates.
        is_dry: whether to measure without writing anything.
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
        """The command line with the same options."""
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
        """The objective of the search."""
        return Objective(self.kind, self.p99_ms or float("inf"))


def check_packages() -> None:
    """Check that the packages of the load generator are installed.

    Raises:
        OperationFailed: a package is missing.
    """
    if missing := [name for name in PACKAGES if not importlib.util.find_spec(name)]:
        raise OperationFailed(
            f"the load generator needs {' and '.join(missing)}; fix: pip install 'nereid-serving[load]'"
        )


def find(options: TuneOptions) -> Tunable:
    """Find the model, and check that its profile can be written.

    Raises:
        WrongUsage: the model cannot be tuned.
        OperationFailed: the profile cannot be written.
    """
    tuned = profiles.tunable(options.repository, options.model, options.profile)
    if not options.is_dry:
        profiles.check_writable(options.repository, tuned)
    return tuned


def search(
    options: TuneOptions,
    tuned: Tunable,
    images: Sequence[bytes],
    environment: Mapping[str, str],
    progress: Progress,
) -> Report:
    """Measure candidates on a server of its own until the time is over.

    Raises:
        OperationFailed: the present config cannot be measured.
    """
    # Imported here: the module needs the packages of the extra `load`.
    from nereid.insight.tune.trial import TrialServer

    deadline_s = time.monotonic() + 60 * options.minutes - STOP_S
    levels, cores = sorted({1, *options.concurrencies}), available_cores()
    repository = options.repository.resolve()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="nereid-tune-") as folder,
            TrialServer(repository, tuned, images, levels, Path(folder), environment, deadline_s) as trial,
        ):
            config = trial.served()
            grid = space.space(config, tuned.backend, cores)
            points, default = list(space.points(grid, cores)), space.present(grid, config)
            settings = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in grid.items())
            progress(f"{len(points)} possible settings: {settings}")
            run = Search(trial.measure, options.objective, len(levels), time.monotonic, deadline_s, progress)
            best, duel = run.run(
                lambda count: space.sample(points, grid, count, options.seed, without=default)
            )
    except (NotMeasured, ServerError) as error:
        raise OperationFailed(f"'{options.model}' cannot be measured as it is: {error}") from None
    for candidate, reason in run.failures.items():
        progress(f"not measured: {dict(candidate)}: {reason}")
    return Report(options.model, options.objective, default, best, duel, run.seen, run.failures)


def write(options: TuneOptions, tuned: Tunable, report: Report, progress: Progress) -> list[str]:
    """Write the profile `tuned`; returns the models in it.

    Raises:
        OperationFailed: the profile cannot be written.
    """
    for model in profiles.overwritten(options.repository, tuned):
        progress(f"note: the tuned settings of '{model}' are replaced; --profile {profiles.TUNED} keeps them")
    now = datetime.datetime.now(datetime.UTC)
    about = [f"{now:%Y-%m-%d %H:%M} UTC, {cpu_model()}, {available_cores()} cores.", report.reason()]
    changed = {name: value for name, value in report.best if (name, value) not in report.default}
    return profiles.write(options.repository, tuned, changed, options.command, about)


def concurrencies(text: str | None) -> tuple[int, ...] | None:
    """Parse a list with commas; None stays None.

    Raises:
        ValueError: a concurrency is not a positive whole number.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise ValueError(f"--concurrency: expected whole numbers from 1, got '{word}'")
    return tuple(dict.fromkeys(map(int, words)))
