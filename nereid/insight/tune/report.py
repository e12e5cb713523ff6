"""The result of a search: the verdict, its reason, and all measurements."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from nereid.insight.tune.load_generator import Load
from nereid.insight.tune.objective import Loads, Objective
from nereid.insight.tune.search import MIN_ROUNDS, Duel, front
from nereid.insight.tune.space import DEFAULT, Candidate

Verdict = Literal["better", "kept", "infeasible"]
MORE_TIME = "fix: more --minutes, or fewer values of --concurrency"


class Point(NamedTuple):
    """A candidate at one concurrency, with its measurement; `mark` is `default`, `chosen` or empty."""

    mark: str
    settings: str
    concurrency: int
    load: Load


@dataclass(frozen=True, slots=True)
class Report:
    """A finished search.

    Args:
        model: the model that was tuned.
        objective: the objective of the search.
        default: the settings of the config in use.
        best: the best candidate.
        duel: the alternating measurements of both.
        seen: the measurements of each candidate; the default is the empty candidate.
        failures: the reason for each candidate that could not be measured.
    """

    model: str
    objective: Objective
    default: Candidate
    best: Candidate
    duel: Duel
    seen: Mapping[Candidate, Loads]
    failures: Mapping[Candidate, str]

    @property
    def verdict(self) -> Verdict:
        """Whether the best candidate is `better`, the default is `kept`, or all are `infeasible`."""
        if DEFAULT in self.failures:
            return "kept"
        default_met, best_met = self._is_default_met(), self._is_met(self.best)
        if not default_met and not best_met:
            return "infeasible"
        if not best_met or len(self.duel.best) < MIN_ROUNDS:
            return "kept"
        if not default_met:
            return "better"
        gain, noise = self.duel.gain(self.objective), self.duel.noise(self.objective)
        return "better" if gain > noise else "kept"

    def _is_default_met(self) -> bool:
        if not self.duel.default:
            return self._is_met(DEFAULT)
        loads = self.duel.default_as_good()
        return self.objective.is_met(loads[self.objective.concurrency(loads)])

    def _is_met(self, candidate: Candidate) -> bool:
        loads = self.seen.get(candidate)
        return loads is not None and self.objective.is_met(loads[self.objective.concurrency(loads)])

    def reason(self) -> str:
        """Explain the verdict in one line, with the numbers."""
        if self.verdict == "infeasible":
            return self._why_infeasible()
        if DEFAULT in self.failures:
            return f"default kept: it failed in the final rounds: {self.failures[DEFAULT]}"
        if self.best == DEFAULT:
            return f"default kept: {self._why_alone()}"
        if self.best in self.failures:
            why = self.failures[self.best]
            return f"default kept: {self.describe(self.best)} was best, but failed in the final rounds: {why}"
        if len(self.duel.best) < MIN_ROUNDS:
            return (
                f"default kept: there was time for {len(self.duel.best)} of {MIN_ROUNDS} final rounds, "
                f"too few to separate a gain from noise; {MORE_TIME}"
            )
        numbers = (
            f"{self.duel.gain(self.objective):+.1%} in {self.objective}, median of {len(self.duel.best)} "
            f"rounds; the default against itself: ±{self.duel.noise(self.objective):.1%}"
        )
        if self.verdict == "kept":
            return f"default kept: {self.describe(self.best)} gives {numbers}"
        late = "" if self._is_default_met() else "the default misses the p99; "
        return f"{self.describe(self.best)}: {late}{numbers}"

    def _why_infeasible(self) -> str:
        nearest = min(self.seen, key=lambda candidate: self.objective.rank(self.seen[candidate]))
        loads = self.seen[nearest]
        number = self.objective.concurrency(loads)
        return (
            f"no setting meets the objective: expected p99 <= {self.objective.p99_ms:g} ms, the best got "
            f"{loads[number].p99_ms:.1f} ms at concurrency {number} with {self.describe(nearest)}; "
            "fix: a larger --p99-ms, or other hardware"
        )

    def _why_alone(self) -> str:
        if not self.default:
            return "its config has no setting that can be tuned"
        if not self.failures:
            return f"there was no time for another candidate; {MORE_TIME}"
        *_, last = self.failures.values()
        return f"all {len(self.failures)} other candidates failed; the last one: {last}"

    def describe(self, candidate: Candidate) -> str:
        """List the settings in which a candidate differs from the default, or those of the default."""
        changed = self.default if candidate == DEFAULT else [e for e in candidate if e not in self.default]
        return ", ".join(f"{name} {value}" for name, value in changed)

    def points(self) -> list[Point]:
        """Return the Pareto front, the default and the best candidate, by falling rate."""
        points = front(self.seen)
        for candidate in (DEFAULT, self.best):
            loads = self.seen.get(candidate, {})
            points += [(candidate, number) for number in loads if (candidate, number) not in points]
        found = [
            Point(self._mark(candidate), self.describe(candidate), number, self.seen[candidate][number])
            for candidate, number in points
        ]
        return sorted(found, key=lambda point: -point.load.rate)

    def _mark(self, candidate: Candidate) -> str:
        return "default" if candidate == DEFAULT else "chosen" if self.is_chosen(candidate) else ""

    def is_chosen(self, candidate: Candidate) -> bool:
        """Check whether a candidate replaces the default."""
        return candidate == self.best and self.verdict == "better"

    def document(self) -> dict[str, Any]:
        """Return the result with all measurements, for JSON."""
        on_front = {candidate for candidate, _ in front(self.seen)}
        has_duel = bool(self.duel.best)
        return {
            "model": self.model,
            "objective": self.objective.kind,
            "p99_ms": self.objective.p99_ms if self.objective.p99_ms < float("inf") else None,
            "verdict": self.verdict,
            "reason": self.reason(),
            "default": dict(self.default),
            "chosen": dict(self.best) if self.verdict == "better" else None,
            "rounds": len(self.duel.best),
            "gain": self.duel.gain(self.objective) if has_duel else None,
            "noise": self.duel.noise(self.objective) if has_duel else None,
            "candidates": [
                {
                    "settings": dict(candidate or self.default),
                    "is_default": candidate == DEFAULT,
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
