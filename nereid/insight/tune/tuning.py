"""A run of `nereid tune`: its options, the search on a server of its own, and the written profile."""

import datetime
import importlib.util
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from nereid.base.errors import OperationFailed, ServerError
from nereid.base.processes import available_cores, cpu_model
from nereid.insight.tune import profiles, search
from nereid.insight.tune.load_generator import LoadResult
from nereid.insight.tune.profiles import Tunable
from nereid.insight.tune.search import (
    CURRENT_CONFIG,
    MAX_CANDIDATES,
    MIN_ROUNDS,
    CandidateSettings,
    FinalComparison,
    LoadResults,
    NotMeasured,
    Objective,
    Search,
    pareto_front,
)
from nereid.insight.tune.trial import TrialServer
from nereid.server.command_line import TUNED_PROFILE

TuneVerdict = Literal["better", "kept", "infeasible"]
MORE_TIME = "fix: more --minutes, or fewer values of --concurrency"
CONCURRENCIES = (1, 8, 32)
DEFAULT_OBJECTIVE = Objective("throughput")
# The fraction of the time that is reserved for stopping the server.
STOP_RESERVE_S = 5.0
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TuneReport:
    """A finished search.

    Args:
        default: the settings of the config in use.
        seen: the measurements of each candidate; the default is the empty candidate.
    """

    model: str
    objective: Objective
    default: CandidateSettings
    best: CandidateSettings
    final: FinalComparison
    seen: Mapping[CandidateSettings, LoadResults]
    failures: Mapping[CandidateSettings, str]

    @property
    def verdict(self) -> TuneVerdict:
        """Whether the best candidate is `better`, the default is `kept`, or all are `infeasible`."""
        return self._judge()[0]

    def reason(self) -> str:
        """Explain the verdict in one line, with the numbers."""
        return self._judge()[1]

    def _judge(self) -> tuple[TuneVerdict, str]:
        default = self.final.lenient_default() if self.final.default else self.seen.get(CURRENT_CONFIG)
        is_default_met, is_best_met = map(self._is_met, (default, self.seen.get(self.best)))
        if CURRENT_CONFIG in self.failures:
            return "kept", f"default kept: it failed in the final rounds: {self.failures[CURRENT_CONFIG]}"
        if not is_default_met and not is_best_met:
            return "infeasible", self._why_infeasible()
        if reason := self._why_not_compared():
            return "kept", f"default kept: {reason}"
        gain, noise = self.final.gain(self.objective), self.final.noise(self.objective)
        numbers = (
            f"{gain:+.1%} in {self.objective}, median of {len(self.final.best)} "
            f"rounds; the default against itself: ±{noise:.1%}"
        )
        if not is_best_met or (is_default_met and gain <= noise):
            return "kept", f"default kept: {self.describe(self.best)} gives {numbers}"
        late = "" if is_default_met else "the default misses the p99; "
        return "better", f"{self.describe(self.best)}: {late}{numbers}"

    def _is_met(self, loads: LoadResults | None) -> bool:
        return loads is not None and self.objective.is_met(loads[self.objective.concurrency(loads)])

    def _why_infeasible(self) -> str:
        nearest = min(self.seen, key=lambda candidate: self.objective.rank(self.seen[candidate]))
        loads = self.seen[nearest]
        number = self.objective.concurrency(loads)
        return (
            f"no setting meets the objective: expected p99 <= {self.objective.p99_ms:g} ms, the best got "
            f"{loads[number].p99_ms:.1f} ms at concurrency {number} with {self.describe(nearest)}; "
            "fix: a larger --p99-ms, or other hardware"
        )

    def _why_not_compared(self) -> str:
        if self.best in self.failures:
            why = self.failures[self.best]
            return f"{self.describe(self.best)} was best, but failed in the final rounds: {why}"
        if self.best != CURRENT_CONFIG and len(self.final.best) >= MIN_ROUNDS:
            return ""
        if self.best != CURRENT_CONFIG:
            return (
                f"there was time for {len(self.final.best)} of {MIN_ROUNDS} final rounds, "
                f"too few to separate a gain from noise; {MORE_TIME}"
            )
        if not self.default:
            return "its config has no setting that can be tuned"
        if not self.failures:
            return f"there was no time for another candidate; {MORE_TIME}"
        *_, last_failure = self.failures.values()
        return f"all {len(self.failures)} other candidates failed; the last one: {last_failure}"

    def describe(self, candidate: CandidateSettings) -> str:
        """List the settings in which a candidate differs from the default; for the default, all."""
        changed = (
            self.default if candidate == CURRENT_CONFIG else [e for e in candidate if e not in self.default]
        )
        return ", ".join(f"{name} {value}" for name, value in changed)

    def points(self) -> list[tuple[str, str, int, LoadResult]]:
        """Return the Pareto front, the default and the best candidate, by decreasing rate.

        Each has a mark (`default`, `chosen` or empty), its settings, the concurrency and the measurement.
        """
        points = pareto_front(self.seen)
        for candidate in (CURRENT_CONFIG, self.best):
            loads = self.seen.get(candidate, {})
            points += [(candidate, number) for number in loads if (candidate, number) not in points]
        rows = [
            (self._mark(candidate), self.describe(candidate), number, self.seen[candidate][number])
            for candidate, number in points
        ]
        return sorted(rows, key=lambda row: -row[-1].rate)

    def _mark(self, candidate: CandidateSettings) -> str:
        return "default" if candidate == CURRENT_CONFIG else "chosen" if self.is_chosen(candidate) else ""

    def is_chosen(self, candidate: CandidateSettings) -> bool:
        """Return whether a candidate replaces the default."""
        return candidate == self.best and self.verdict == "better"

    def document(self) -> dict[str, Any]:
        """Return the result with all measurements, for JSON."""
        on_front = {candidate for candidate, _ in pareto_front(self.seen)}
        has_final = bool(self.final.best)
        return {
            "model": self.model,
            "objective": self.objective.kind,
            "p99_ms": self.objective.p99_ms if self.objective.p99_ms < float("inf") else None,
            "verdict": self.verdict,
            "reason": self.reason(),
            "default": dict(self.default),
            "chosen": dict(self.best) if self.verdict == "better" else None,
            "rounds": len(self.final.best),
            "gain": self.final.gain(self.objective) if has_final else None,
            "noise": self.final.noise(self.objective) if has_final else None,
            "candidates": [
                {
                    "settings": dict(candidate or self.default),
                    "is_default": candidate == CURRENT_CONFIG,
                    "is_chosen": self.is_chosen(candidate),
                    "is_on_front": candidate in on_front,
                    "loads": {str(number): asdict(load) for number, load in loads.items()},
                }
                for candidate, loads in self.seen.items()
            ],
            "failed": [
                {"settings": dict(candidate or self.default), "reason": reason}
                for candidate, reason in self.failures.items()
            ],
        }


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of a run.

    Args:
        repository, model, profile: the model, and the profile to start from.
        concurrencies: numbers of requests in flight; 1 is always added.
        images: image files, or folders with images; none for the sample photo.
    """

    repository: Path
    model: str
    profile: str
    objective: Objective = DEFAULT_OBJECTIVE
    minutes: float = 5.0
    concurrencies: Sequence[int] = CONCURRENCIES
    images: Sequence[Path] = ()
    seed: int = 0
    is_dry: bool = False

    @property
    def command(self) -> str:
        """The command line with the same options."""
        kind, p99_ms = self.objective.kind, self.objective.p99_ms
        words = ["nereid", "tune", self.model, "--objective", kind]
        words += ["--p99-ms", f"{p99_ms:g}"] if p99_ms < float("inf") else []
        words += ["--minutes", f"{self.minutes:g}", "--profile", self.profile, "--seed", str(self.seed)]
        words += ["--concurrency", ",".join(map(str, self.concurrencies))]
        for path in self.images:
            words += ["--images", str(path)]
        words += ["--repository", str(self.repository)]
        return shlex.join(words)


def check_packages() -> None:
    """Check that the package of the load generator is installed.

    Raises:
        OperationFailed: it is missing.
    """
    if not importlib.util.find_spec("uvloop"):
        raise OperationFailed("the load generator needs uvloop; fix: pip install 'nereid-serving[load]'")


def run_search(
    options: TuneOptions,
    tuned: Tunable,
    images: Sequence[bytes],
    environment: Mapping[str, str],
    progress: Progress,
) -> TuneReport:
    """Measure candidates on a server of its own until the time is up.

    Raises:
        OperationFailed: the current config cannot be measured.
    """
    deadline = time.monotonic() + 60 * options.minutes - STOP_RESERVE_S
    levels, cores = sorted({1, *options.concurrencies}), available_cores()
    repository = options.repository.resolve()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="nereid-tune-") as folder,
            TrialServer(repository, tuned, images, levels, Path(folder), environment, deadline) as trial,
        ):
            config = trial.served_config()
            grid = search.space(config, tuned.backend, cores)
            points, default = list(search.points(grid, cores)), search.settings_of(grid, config)
            settings = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in grid.items())
            progress(f"{len(points)} possible settings: {settings}")
            run = Search(trial.measure, options.objective, len(levels), time.monotonic, deadline, progress)
            best, final = run.run(search.sample(points, grid, MAX_CANDIDATES, options.seed, default))
    except (NotMeasured, ServerError) as error:
        raise OperationFailed(f"'{options.model}' cannot be measured as it is: {error}") from None
    for candidate, reason in run.failures.items():
        progress(f"not measured: {dict(candidate)}: {reason}")
    return TuneReport(options.model, options.objective, default, best, final, run.seen, run.failures)


def write(options: TuneOptions, tuned: Tunable, report: TuneReport, progress: Progress) -> list[str]:
    """Write the profile `tuned`; return the models in it.

    Raises:
        OperationFailed: the profile cannot be written.
    """
    for model in profiles.overwritten_models(options.repository, tuned):
        progress(f"note: the tuned settings of '{model}' are replaced; --profile {TUNED_PROFILE} keeps them")
    now = datetime.datetime.now(datetime.UTC)
    about = [f"{now:%Y-%m-%d %H:%M} UTC, {cpu_model()}, {available_cores()} cores.", report.reason()]
    changed = {name: value for name, value in report.best if (name, value) not in report.default}
    return profiles.write(options.repository, tuned, changed, options.command, about)


def concurrencies(text: str) -> tuple[int, ...]:
    """Parse a comma-separated list.

    Raises:
        ValueError: a concurrency is not a positive whole number.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise ValueError(f"--concurrency: expected whole numbers from 1, got '{word}'")
    return tuple(dict.fromkeys(map(int, words)))
