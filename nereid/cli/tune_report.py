"""What a search found, for a person and for a script."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nereid.tune.objective import Loads, Objective
from nereid.tune.search import LEAST_ROUNDS, Duel, front
from nereid.tune.space import DEFAULT, Candidate

Verdict = Literal["better", "kept", "infeasible"]
MORE_TIME = "fix: more --minutes, or fewer values of --concurrency"
HEADINGS = ("", "settings", "concurrency", "images/s", "p50 ms", "p99 ms")


@dataclass(frozen=True, slots=True)
class Report:
    """A search that is over.

    Args:
        model: what was tuned.
        objective: what is best.
        default: the settings of the config in use.
        best: the best candidate.
        duel: of the two.
        seen: what each candidate did; the default is the empty one.
        refused: those that could not be measured, and why.
    """

    model: str
    objective: Objective
    default: Candidate
    best: Candidate
    duel: Duel
    seen: Mapping[Candidate, Loads]
    refused: Mapping[Candidate, str]

    @property
    def verdict(self) -> Verdict:
        """Whether the best is `better`, the default is `kept`, or all is `infeasible`."""
        if DEFAULT in self.refused:
            return "kept"
        default_met, best_met = self._is_default_met(), self._is_met(self.best)
        if not default_met and not best_met:
            return "infeasible"
        if not best_met or len(self.duel.best) < LEAST_ROUNDS:
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
        """Say in a line what was decided, with the numbers."""
        if self.verdict == "infeasible":
            nearest = min(self.seen, key=lambda candidate: self.objective.rank(self.seen[candidate]))
            loads = self.seen[nearest]
            number = self.objective.concurrency(loads)
            load = loads[number]
            return (
                f"nothing meets p99 <= {self.objective.p99_ms:g} ms; the best found has "
                f"{load.p99_ms:.1f} ms at concurrency {number}: {self.describe(nearest)}"
            )
        if DEFAULT in self.refused:
            return f"default kept: it could not be measured in the end: {self.refused[DEFAULT]}"
        if self.best == DEFAULT:
            return f"default kept: {self._why_alone()}"
        if self.best in self.refused:
            why = self.refused[self.best]
            return f"default kept: {self.describe(self.best)} was the best, but in the end: {why}"
        if len(self.duel.best) < LEAST_ROUNDS:
            return (
                f"default kept: there was time for {len(self.duel.best)} of {LEAST_ROUNDS} rounds, "
                f"too few to tell a gain from noise; {MORE_TIME}"
            )
        numbers = (
            f"{self.duel.gain(self.objective):+.1%} in {self.objective}, median of {len(self.duel.best)} "
            f"rounds; the default against itself: ±{self.duel.noise(self.objective):.1%}"
        )
        if self.verdict == "kept":
            return f"default kept: {self.describe(self.best)} gives {numbers}"
        late = "" if self._is_default_met() else "the default misses the p99; "
        return f"{self.describe(self.best)}: {late}{numbers}"

    def _why_alone(self) -> str:
        if not self.default:
            return "it has no setting that can be tuned"
        if not self.refused:
            return f"there was no time for any other candidate; {MORE_TIME}"
        *_, last = self.refused.values()
        return f"none of {len(self.refused)} other candidates could be measured, the last: {last}"

    def describe(self, candidate: Candidate) -> str:
        """Say how a candidate differs from the default."""
        if candidate == DEFAULT:
            return ", ".join(f"{name} {value}" for name, value in self.default)
        changed = [each for each in candidate if each not in self.default]
        return ", ".join(f"{name} {value}" for name, value in changed)

    def show(self, console: Console) -> None:
        """Print the Pareto table: what nothing beats in both rate and p99, and the default."""
        table = Table(*HEADINGS)
        points = front(self.seen)
        for candidate in (DEFAULT, self.best):
            loads = self.seen.get(candidate, {})
            points += [(candidate, number) for number in loads if (candidate, number) not in points]
        rows = [(self.seen[candidate][number], candidate, number) for candidate, number in points]
        for load, candidate, number in sorted(rows, key=lambda row: -row[0].rate):
            marks = "default" if candidate == DEFAULT else "chosen" if self.is_chosen(candidate) else ""
            numbers = (str(number), f"{load.rate:.1f}", f"{load.p50_ms:.1f}", f"{load.p99_ms:.1f}")
            table.add_row(marks, escape(self.describe(candidate)), *numbers)
        console.print(table)

    def is_chosen(self, candidate: Candidate) -> bool:
        """Tell whether it takes the default's place."""
        return candidate == self.best and self.verdict == "better"

    def document(self) -> dict[str, Any]:
        """Return all that was measured, for JSON."""
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
            "refused": [
                {"settings": dict(candidate or self.default), "reason": reason}
                for candidate, reason in self.refused.items()
            ],
        }
