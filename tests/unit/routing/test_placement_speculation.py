"""Requests whose tokens are due faster than an iteration takes."""

import pytest

from planning.admission.search import ADMITTED
from planning.limits import make_limits
from profiles.kernels import iteration_s
from routing import idle
from routing.placement import NOWHERE
from tests.support.planning_cases import COEFS
from tests.unit.routing.test_placement import fleet_of, new, put
from tests.unit.routing.test_returns import asked, replicas, room


@pytest.mark.parametrize(("acceptance", "goes_to"), [(0.0, NOWHERE), (0.8, 1)])
def test_an_objective_that_needs_speculation_goes_where_that_is_known_to_pay(acceptance: float, goes_to: int) -> None:
    """Its tokens are due faster than an iteration takes; the second replica makes up to 3.4 of one."""
    fleet, rows = fleet_of([0, 1]), new()
    fleet.limits["drafts"][1], fleet.limits["acceptance"][1] = 4, acceptance
    rows["ttft_s"], rows["tpot_s"] = 0.5, 0.6 * iteration_s(COEFS[0], 1.0, 0.0, 0.0, 1.0, 0.0)
    rows["output_tokens"] = rows["output_cap_tokens"] = 800  # an early first token helps few of them
    placed = put(fleet, rows)[0]
    assert placed["replica"] == goes_to
    assert (idle.at_best(fleet, rows[0], 0.0)[0] == ADMITTED) == (goes_to != NOWHERE)
    if goes_to != NOWHERE:
        at = fleet.replicas[1]["count"] - 1
        assert fleet.tables[1, at]["spec_tokens"] > 0
        assert 0.0 < fleet.replicas[1]["load"] < 1.0
        assert placed["tpot_s"] <= rows["tpot_s"][0]
        assert rows["spec_tokens"][0] == 0, "what was asked stays as it was"


def test_room_is_told_for_what_needs_drafts_beside_others() -> None:
    fleet, ledger = replicas([3], make_limits(100_000, drafts=4, acceptance=0.8), left=1000)
    row = asked(output_tokens=500, prompt_tokens=500)
    row["tpot_s"] = 0.6 * iteration_s(COEFS[0], 1.0, 0.0, 0.0, 1.0, 0.0)
    assert room(fleet, ledger, row) == (1, 0)
