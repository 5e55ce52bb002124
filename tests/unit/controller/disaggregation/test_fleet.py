"""Decisions of a fleet that prefills and decodes on different replicas."""

import msgspec
import numpy as np
import pytest

from controller.decisions import NO_PLACE
from controller.disaggregation.fleet import DisaggregatedFleet, make_fleet
from controller.disaggregation.phases import Phase, PhaseOptions
from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.programs.history import FEW_SCALES
from controller.scaling.tiers import Tier, TierTable
from controller.status import fleet_status
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Progress, Slo, Verdict
from protocol.programs import Program
from tests.support.disaggregated_cases import fleet, full, one, second
from tests.support.fleet_cases import FLEX, TIERS, TIGHT, ask, ended, report


def test_without_phases_it_is_the_ordinary_fleet() -> None:
    assert type(make_fleet(FleetOptions(), TIERS, load_profile)) is Fleet


@pytest.mark.parametrize("slo", [TIGHT, FLEX, Slo(e2e_s=20.0, tier="loose")])
def test_first_to_a_replica_that_prefills_then_to_one_that_decodes(slo: Slo) -> None:
    state = fleet()
    asked = ask(slo)
    first = one(state, asked)
    assert (first.verdict, first.prefill_only, first.output_tokens) == (Verdict.ADMITTED, True, 100)
    assert first.replica in {"p", "q"}
    then = one(state, second(asked), 0.1)
    assert (then.verdict, then.prefill_only) == (Verdict.ADMITTED, False)
    assert then.replica in {"d", "e", "f"}
    assert [len(state.replicas[name].table) for name in (first.replica, then.replica)] == [0, 1]
    state.on_outcome(ended(asked, "length", 100), 1.0)
    assert all(len(replica.table) == 0 for replica in state.replicas.values())


def test_a_prompt_is_no_decode_on_the_prefill_side_and_no_prompt_on_the_other() -> None:
    state = fleet()
    asked = ask(TIGHT, 3000)
    prefill = state.replicas[one(state, asked).replica]
    assert prefill.state["backlog_tokens"][0] == 2999
    assert prefill.state["token_rate"][0] == 0.0
    decode = state.replicas[one(state, second(asked), 0.1).replica]
    assert decode.state["backlog_tokens"][0] == 0
    assert decode.state["decode_kv_tokens"][0] == 3001


def test_prompts_of_all_tiers_share_the_prefill_side_and_each_decodes_in_its_own() -> None:
    tiers = TierTable.of(
        1,
        [
            Tier("tight", 0.3, 0.03, num_replicas=1),
            Tier("loose", 3.0, 0.1, num_replicas=2),
            Tier("flex", best_effort=True),
        ],
    )
    state = fleet("pdef", 1, tiers)
    assert [int(state.replicas[name].state["tier"][0]) for name in "pdef"] == [-1, 0, 1, 1]
    for slo, where in ((TIGHT, {"d"}), (Slo(3.0, 0.1, tier="loose"), {"e", "f"})):
        asked = ask(slo)
        assert one(state, asked).replica == "p"
        assert one(state, second(asked), 0.1).replica in where


def test_what_cannot_move_decodes_where_it_prefills() -> None:
    decision = one(fleet(), ask(TIGHT, can_disaggregate=False))
    assert (decision.verdict, decision.prefill_only) == (Verdict.ADMITTED, False)
    assert decision.replica in {"d", "e", "f"}


def test_a_stream_that_lost_its_replica_is_computed_anew_on_the_decode_side() -> None:
    state = fleet()
    asked = ask(TIGHT)
    one(state, asked)
    one(state, second(asked), 0.1)
    lost = msgspec.structs.replace(asked, emitted_tokens=7, exclude=("d",), age_s=0.5)
    decision = one(state, lost, 0.5)
    assert (decision.prefill_only, decision.replica in {"e", "f"}) == (False, True)
    assert state.replicas[decision.replica].state["backlog_tokens"][0] == 500 + 7 - 1


def test_nothing_is_prefilled_that_could_not_be_decoded() -> None:
    state = fleet("pqd", pending=True)
    full(state, "d", 0.0)
    decision = one(state, ask(TIGHT, 9000))
    assert (decision.verdict, decision.prefill_only) == (Verdict.PENDING, False)
    assert len(state.replicas["p"].table) == len(state.replicas["q"].table) == 0


@pytest.mark.parametrize("left", ["pq", "de"])
def test_a_fleet_that_has_lost_a_side_serves_whole_requests(left: str) -> None:
    state = fleet("pqde")
    for name in left:
        state.report(report(name, 2), 5.0)
    decision = one(state, ask(TIGHT), 5.1)
    assert (decision.verdict, decision.prefill_only, decision.replica in left) == (Verdict.ADMITTED, False, True)
    asked = ask(TIGHT, emitted_tokens=1, transferred_kv_tokens=500)
    assert one(state, asked, 5.1).replica in left


def test_prompts_go_to_the_idlest_that_attains() -> None:
    """No load gradient on the prefill side: a first token that comes early is slack for the decode."""
    state = fleet()
    places = [one(state, ask(TIGHT, 1000)).replica for _ in range(4)]
    assert sorted(places) == ["p", "p", "q", "q"]
    assert {one(state, ask(TIGHT, 2000)).replica for _ in range(12)} - {""} == {"p", "q"}, "the rest waits"


def test_a_chosen_routing_holds_on_the_prefill_side_too() -> None:
    state = fleet(routing="sequential")
    assert len({one(state, ask(TIGHT, 100)).replica for _ in range(4)}) == 2
    state = fleet(routing="predicted_headroom")
    assert len({one(state, ask(TIGHT, 100)).replica for _ in range(4)}) == 1


def test_best_effort_prompts_do_not_make_a_side_short() -> None:
    state = fleet()
    for _ in range(6):
        one(state, ask(Slo(best_effort=True), 3000))
    assert {state._busy(state.replicas[name]) for name in "pq"} == {0.0}
    one(state, ask(TIGHT, 1000))
    assert {state._busy(state.replicas[name]) for name in "pq"} == {0.0, 1.0}


def test_both_sides_are_decided_in_one_batch_and_in_order() -> None:
    state = fleet()
    old = [ask(TIGHT) for _ in range(3)]
    state.admit(old, 0.0)
    batch = [x for pair in zip(map(second, old), [ask(TIGHT) for _ in range(3)], strict=True) for x in pair]
    decisions = state.admit(batch, 0.1)
    assert [d.request_id for d in decisions] == [a.request_id for a in batch]
    assert [d.prefill_only for d in decisions] == [False, True] * 3


def test_a_bound_replica_says_so_in_its_reports() -> None:
    state = fleet("", 0)
    for name, phase in (("a", "decode"), ("b", "prefill")):
        state.report(report(name, phase=phase), 0.0)
    assert one(state, ask(TIGHT)).replica == "b"
    told = {replica["replica"]: replica["phase"] for replica in fleet_status(state, 0.0)["replicas"]}
    assert told == {"a": "decode", "b": "prefill"}


def test_the_side_that_is_short_is_given_a_replica_with_what_it_carries() -> None:
    options = PhaseOptions(prefill=1, window_s=1.0, cooldown_s=5.0)
    state = make_fleet(FleetOptions(length_prior_tokens=100.0, phases=options), TIERS, load_profile)
    assert isinstance(state, DisaggregatedFleet)
    waiting = tuple(Progress(f"w{i}", TIGHT, 0.1, 5000, 0, 0, 1, 1, False) for i in range(9))
    running = (Progress("runs", TIGHT, 1.0, 500, 520, 21, 100, 200, True),)
    for tick in range(40):
        for name, requests in (("p", waiting), ("d", running), ("e", ())):
            state.report(report(name, tick + 1, requests), tick / 4)
    assert state.phases.on(Phase.PREFILL) == ["e", "p"], "the idlest moves"
    assert [str(change) for change in state.allocation.history] == ["e: decode -> prefill (prefill is 100% busy)"]
    assert len(state.replicas["d"].table) == 1


def test_an_option_that_changes_moves_nobody() -> None:
    state = fleet("abcd", 1)
    changed = make_fleet(msgspec.structs.replace(state.options, max_hops=2), TIERS, load_profile)
    assert isinstance(changed, DisaggregatedFleet)
    state.phases.set_replicas(dict.fromkeys("bcd", ""))
    sides = {name: state.phases.of(name) for name in "bcd"}
    state.replicas.pop("a")
    changed.adopt_state(state, 10.0)
    assert {name: changed.phases.of(name) for name in "bcd"} == sides


def test_replicas_of_the_decode_side_join_a_tier_when_it_needs_them() -> None:
    """Roles that move, on one side only; nothing is prefilled for a tier that can get no replica."""
    bounds = [Tier("tight", 0.3, 0.03, max_replicas=1), Tier("loose", 3.0, 0.1), Tier("flex", best_effort=True)]
    state = fleet("pde", 1, TierTable.of(1, bounds))
    assert [replica["tier"] for replica in fleet_status(state, 0.0)["replicas"]] == ["pool", "pool", "prefill"]
    asked = ask(TIGHT)
    assert one(state, asked).prefill_only
    then = one(state, second(asked), 0.1)
    assert (then.verdict, then.reason) == (Verdict.ADMITTED, "attainable")
    tiers = {replica["replica"]: replica["tier"] for replica in fleet_status(state, 0.1)["replicas"]}
    assert tiers == {then.replica: "tight", "p": "prefill", ({"d", "e"} - {then.replica}).pop(): "pool"}
    demand = state.allocation.demand.loads(1.0)["tight"]
    assert demand.decode_tokens_per_s == pytest.approx(100 * demand.requests_per_s), "as a whole, and once"


def test_what_is_prefilled_stays_off_replicas_of_looser_tiers() -> None:
    tiers = TierTable.of(
        1,
        [
            Tier("tight", 0.3, 0.03, num_replicas=1),
            Tier("loose", 3.0, 0.1, num_replicas=2),
            Tier("flex", best_effort=True),
        ],
    )
    state = fleet("pdef", 1, tiers)
    asked = ask(TIGHT, 9000)
    assert one(state, asked).prefill_only
    full(state, "d", 0.1)
    assert one(state, second(asked), 0.1).verdict == Verdict.PENDING


def test_under_load_every_promise_is_of_the_right_side() -> None:
    state, rng = fleet("pqdefg", pending=True), np.random.default_rng(0)
    asks = [ask(TIGHT if i % 2 else Slo(3.0, 0.1, tier="loose"), int(rng.integers(10, 4000))) for i in range(200)]
    carried: list[AdmissionRequest] = []
    for tick in range(20):
        decisions = state.admit([*asks[tick * 10 : tick * 10 + 10], *map(second, carried)], tick * 0.05)
        by_id = {each.request_id: each for each in asks}
        for decision in decisions:
            if decision.replica:
                phase = state.phases.of(decision.replica)
                assert (phase == Phase.PREFILL) == decision.prefill_only
        carried = [by_id[d.request_id] for d in decisions if d.prefill_only]
        state.check_integrity()


def test_a_program_that_may_be_promised_waits_for_a_place_before_its_prompt() -> None:
    state, due = fleet(), Slo(e2e_s=1000.0, tier="loose", is_tier_open=True)
    for _ in range(FEW_SCALES):
        state.programs._history("", "a").note_scale(8.0)
    places = state.programs.places
    places.tokens = 1e9
    asked = AdmissionRequest("p-0", 300, 100, due, program=Program("p", due.e2e_s, app="a"))
    assert (one(state, asked).verdict, one(state, asked).reason) == (Verdict.PENDING, NO_PLACE)
    places.tokens = 0.0
    assert one(state, asked, 1.0).prefill_only
    assert places.tokens > 0.0
    then = one(state, second(asked), 1.1)
    assert (then.verdict, then.prefill_only) == (Verdict.ADMITTED, False)
