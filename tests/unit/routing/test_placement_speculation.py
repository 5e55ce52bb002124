"""Requests whose tokens are due faster than an iteration takes."""

import pytest

from profiles.kernels import iteration_s
from routing import idle
from routing.placement import NOWHERE
from tests.support.planning_cases import COEFS
from tests.unit.routing.test_placement import fleet_of, new, put


@pytest.mark.parametrize(("acceptance", "goes_to"), [(0.0, NOWHERE), (0.8, 1)])
def test_an_objective_that_needs_speculation_goes_where_that_is_known_to_pay(acceptance: float, goes_to: int) -> None:
    """Its tokens are due faster than an iteration takes; the second replica makes up to 3.4 of one."""
    fleet, asked = fleet_of([0, 1]), new()
    fleet.limits["drafts"][1], fleet.limits["acceptance"][1] = 4, acceptance
    asked["ttft_s"], asked["tpot_s"] = 0.5, 0.6 * iteration_s(COEFS[0], 1.0, 0.0, 0.0, 1.0, 0.0)
    asked["output_tokens"] = asked["output_cap_tokens"] = 800  # an early first token helps few of them
    placed = put(fleet, asked)[0]
    assert placed["replica"] == goes_to
    assert idle.can_ever(fleet, asked[0], 0.0) == (goes_to != NOWHERE)
    if goes_to != NOWHERE:
        at = fleet.replicas[1]["count"] - 1
        assert fleet.tables[1, at]["spec_tokens"] > 0
        assert 0.0 < fleet.replicas[1]["load"] < 1.0
        assert placed["tpot_s"] <= asked["tpot_s"][0]
        assert asked["spec_tokens"][0] == 0, "what was asked stays as it was"
