"""The section ``lengths``."""

import typing

import pytest
from pydantic import ValidationError

from controller.lengths.estimate import ORACLE, LengthOptions
from controller.lengths.estimators import ESTIMATORS
from controller.lengths.fleet_lengths import FleetLengths
from protocol.messages import AdmissionRequest
from serving.config.lengths import LEAST_WINDOW, LengthsConfig
from tests.support.fleet_cases import LOOSE, ended


def finished_before_a_forest(options: LengthOptions) -> int | None:
    """Requests of a single tenant that end until a forest is due; None: it never is."""
    lengths = FleetLengths(options, 100.0, {})
    for k in range(500):
        asked = AdmissionRequest(f"r{k}", 500, 200, LOOSE, tenant="only")
        lengths.at_arrival(asked)
        lengths.learn(ended(asked, "stop", 50 + k % 50))
        if lengths.training_set() is not None:
            return k + 1
    return None


def test_every_estimator_but_the_simulators_own_can_be_configured() -> None:
    named = typing.get_args(LengthsConfig.model_fields["estimator"].annotation)
    assert set(named) == ESTIMATORS.keys() - {ORACLE}


def test_the_least_window_has_room_for_a_forest_of_a_single_tenant() -> None:
    """Of which it keeps a quarter: with a window of 100, which was allowed, no forest ever grew."""
    least = LengthsConfig(estimator="forest", window=LEAST_WINDOW).options(0)
    assert finished_before_a_forest(least) == 60
    with pytest.raises(ValidationError, match=f"greater than or equal to {LEAST_WINDOW}"):
        LengthsConfig(window=LEAST_WINDOW - 1)
    assert finished_before_a_forest(LengthOptions("forest", window=LEAST_WINDOW - 4)) is None
