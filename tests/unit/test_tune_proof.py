"""The tuner's proof without a server: what it makes of measurements, and of those that fail."""

import pytest

from loadtest import tune_proof
from nereid.tune.load_generator import Load
from nereid.tune.search import NotMeasured

TUNED, BEST = (("instances", 9),), tune_proof.grid()[0]
RATES = {TUNED: 95.0, BEST: 100.0}
ROUNDS = 3


def measure_but(*failing: int, of=TUNED):
    """Measure on a machine that fails a candidate the nth times it is asked, from 0 on."""
    asked = []

    def measure(candidate, seconds):
        asked.append(candidate)
        if candidate == of and asked.count(of) - 1 in failing:
            raise NotMeasured("7 failed")
        rate = RATES.get(candidate, 50.0)
        return {tune_proof.CONCURRENCY: Load(rate, 5.0, 5.0, 5.0, 9, 0)}

    return measure


@pytest.mark.parametrize("failing", [(), (1,), (0, ROUNDS)], ids=["none", "one", "in-both-parts"])
@pytest.mark.parametrize("of", [TUNED, BEST], ids=["tuned", "best"])
def test_measurement_that_fails_leaves_a_hole(failing, of, capsys):
    """The result is that of the other rounds, and each hole is told."""
    rows, share = tune_proof.compare(measure_but(*failing, of=of), TUNED, ROUNDS, 0.0)

    assert share == 0.95
    assert (len(rows), rows[0]["settings"]) == (1 + len(tune_proof.grid()), tune_proof.described(BEST))
    assert capsys.readouterr().err.count("not measured: ") == len(failing)


def test_point_that_always_fails_has_no_row():
    """The others are compared without it."""
    rows, share = tune_proof.compare(measure_but(*range(99), of=BEST), TUNED, ROUNDS, 0.0)

    assert tune_proof.described(BEST) not in [row["settings"] for row in rows]
    assert share == round(95 / 50, 3)


@pytest.mark.parametrize("failing", [range(ROUNDS), range(ROUNDS, 99)], ids=["among-all", "against-the-best"])
def test_tuned_config_that_fails_throughout_proves_nothing(failing):
    """It is an error with its reason, not a ratio."""
    with pytest.raises(NotMeasured, match="the tuned config"):
        tune_proof.compare(measure_but(*failing), TUNED, ROUNDS, 0.0)
