"""Requests for a LoRA adapter go where it is held, as long as that costs nothing that was promised."""

import pytest

from controller.options import AdapterOptions
from protocol.messages import Slo, Verdict
from tests.support.fleet_cases import FLEX, LOOSE, TIGHT, ask, ended, fleet, report


@pytest.mark.parametrize("slo", [LOOSE, FLEX])
def test_an_adapter_stays_where_it_was_loaded(slo: Slo) -> None:
    state = fleet(adapters=AdapterOptions(2, 2))
    for name in "abc":
        state.report(report(name), 0.0)
    homes: dict[str, set[str]] = {"poet": set(), "lawyer": set()}
    for turn in range(4):
        for adapter, replicas in homes.items():
            (decision,) = state.admit([ask(slo, adapter=adapter)], 0.1 * turn)
            replicas.add(decision.replica)
    assert all(len(replicas) == 1 for replicas in homes.values()), homes


def test_what_asks_for_the_model_itself_is_not_bound() -> None:
    state = fleet(adapters=AdapterOptions(2, 2))
    for name in "ab":
        state.report(report(name), 0.0)
    assert {state.admit([ask(TIGHT)], 0.0)[0].replica for _ in range(4)} == {"a", "b"}


def test_a_full_batch_sends_further_adapters_elsewhere_while_it_lasts() -> None:
    state = fleet(adapters=AdapterOptions(1, 4))
    for name in "ab":
        state.report(report(name), 0.0)
    first = ask(LOOSE, adapter="poet")
    (home,) = state.admit([first], 0.0)
    (other,) = state.admit([ask(LOOSE, adapter="lawyer")], 0.0)
    assert other.replica != home.replica
    third = ask(LOOSE, adapter="doctor")
    (decision,) = state.admit([third], 0.0)
    assert decision.replica, "where every batch is full, some replica takes it all the same"
    state.on_outcome(ended(first, "length", 5), 1.0)
    if decision.replica == home.replica:
        state.on_outcome(ended(third, "length", 5), 1.0)
    (again,) = state.admit([ask(LOOSE, adapter="judge")], 1.0)
    assert again.replica == home.replica


@pytest.mark.parametrize("beside", ["a", "b"])
def test_an_objective_goes_where_only_best_effort_has_the_last_place_for_an_adapter(beside: str) -> None:
    """The engine gives it that place; beside a promised one it would wait."""
    state, (other,) = fleet(adapters=AdapterOptions(1, 4)), {"a", "b"} - {beside}
    for name, slo, adapter, others in ((beside, FLEX, "poet", 5), (other, LOOSE, "lawyer", 0)):
        state.report(report(name), 0.0)
        (there,) = state.admit([ask(slo, adapter=adapter)], 0.0)
        assert there.replica == name
        state.admit([ask(LOOSE) for _ in range(others)], 0.0)  # of the model itself: this replica is the busier one
    for slo in (LOOSE, TIGHT):
        (decision,) = state.admit([promised := ask(slo, adapter="doctor")], 0.0)
        assert (decision.verdict, decision.replica) == (Verdict.ADMITTED, beside)
        state.on_outcome(ended(promised, "abort"), 0.0)
    state.report(report("c"), 0.0)
    (decision,) = state.admit([ask(LOOSE, adapter="doctor")], 0.0)
    assert decision.replica == "c", "where a place is free nobody yields"


def test_a_replica_that_failed_a_request_does_not_get_it_again_for_its_adapter() -> None:
    state = fleet(adapters=AdapterOptions(1, 4))
    for name in "ab":
        state.report(report(name), 0.0)
    (home,) = state.admit([ask(LOOSE, adapter="poet")], 0.0)
    (other,) = state.admit([ask(LOOSE, adapter="poet", exclude=(home.replica,))], 0.0)
    assert other.replica not in ("", home.replica)


def test_requests_that_have_ended_leave_nothing_at_an_adapter_with_room_beside_it() -> None:
    """One number stayed for each request while fewer adapters were there than one batch takes."""
    state = fleet(adapters=AdapterOptions(4, 4))
    for turn in range(300):
        state.report(report("a", 1 + turn), 0.1 * turn)
        asked = ask(TIGHT, adapter="poet")
        assert state.admit([asked], 0.1 * turn)[0].replica == "a"
        state.on_outcome(ended(asked, "length", 5), 0.1 * turn + 0.05)
    assert sum(map(len, state.replicas["a"].adapters._uids.values())) < 100
