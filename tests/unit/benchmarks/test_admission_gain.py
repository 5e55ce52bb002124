"""The variants that promise more than the planner do so."""

from benchmarks.admission_gain import GIVING_BACK, TRIED, less_careful
from controller import calibration
from controller.calibration import Calibration
from controller.mirror import correction
from tests.support.fleet_cases import TIERS
from tests.unit.controller.test_calibration import outcome


def asked_after_a_broken_promise() -> float:
    known = Calibration()
    known.note(outcome(False), TIERS)
    return known.least_chance(0, TIERS)


def test_each_variant_is_less_careful_in_its_own_way_and_only_while_it_runs() -> None:
    careful = asked_after_a_broken_promise(), correction.MOST_CAUTION
    found = {}
    for name in TRIED | GIVING_BACK:
        with less_careful(name):
            found[name] = asked_after_a_broken_promise(), correction.MOST_CAUTION
    assert careful[0] > calibration.FIRST_CHANCE
    assert careful[1] > 0.0
    assert found.pop("live, any chance") == (0.0, careful[1])
    assert found.pop("live, no caution") == (careful[0], 0.0)
    assert set(found.values()) == {careful} == {(asked_after_a_broken_promise(), correction.MOST_CAUTION)}
