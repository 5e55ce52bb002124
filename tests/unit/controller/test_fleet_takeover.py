"""What a fleet under other options knows from the one before it."""

import msgspec

from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from controller.status import fleet_status
from profiles.store import load_profile
from protocol.messages import Verdict
from tests.support.fleet_cases import LOOSE, TIERS, TIGHT, ask, ended, fleet, report
from tests.unit.controller.test_held import full, held

# Another tier before all others, so that each of these is at another position.
CHANGED = TierTable.of(2, [Tier("tighter", 0.1, 0.01), *TIERS.tiers])


def successor(state: Fleet, tiers: TierTable | None = None, **options: object) -> Fleet:
    made = Fleet(msgspec.structs.replace(state.options, **options), tiers or state.tiers, load_profile)
    made.adopt_state(state, 0.0)
    return made


def test_requests_are_of_the_same_tiers_in_another_table() -> None:
    state = fleet(pending=True)
    state.report(report("a"), 0.0)
    decisions = state.admit([ask(slo, 8000) for slo in (LOOSE, *[TIGHT] * 8)], 0.0)
    waiting = sum(d.verdict == Verdict.PENDING for d in decisions)
    assert waiting
    assert fleet_status(state, 0.0)["waiting"] == {"tight": waiting}
    held = [state.tiers.tiers[tier].name for tier in state.replicas["a"].table["tier"]]
    made = successor(state, CHANGED, max_hops=9)
    assert {"tight", "loose"} == set(held)
    assert [made.tiers.tiers[tier].name for tier in made.replicas["a"].table["tier"]] == held
    assert fleet_status(made, 0.0)["waiting"] == {"tight": waiting}
    made.check_integrity()


def test_requests_that_may_lose_their_places_still_may() -> None:
    state, asks, _ = full()
    assert held(state, asks)
    known = state.held._by_slot()
    assert known
    assert successor(state, max_hops=9).held._by_slot() == known


def test_lengths_that_were_learnt_stay_and_new_priors_are_for_the_others() -> None:
    state = fleet()
    state.report(report("a"), 0.0)
    for _ in range(200):
        state.on_outcome(ended(ask(TIGHT), "stop", 20), 0.0)
    made = successor(state, length_prior_tokens=70.0)
    tight, loose = made.admit([ask(TIGHT), ask(LOOSE)], 0.0)
    assert (tight.output_tokens, loose.output_tokens) == (20, 70)


def test_what_affinity_has_counted_stays() -> None:
    state = Fleet(FleetOptions(prefix_affinity=1.0), TIERS, load_profile)
    state.report(report("a"), 0.0)
    for _ in range(2):
        state.admit([ask(TIGHT, 320, prefix=tuple(range(10)))], 0.0)
    counted = fleet_status(state, 0.0)["prefixes"]
    assert counted["hit_tokens"] > 0
    assert fleet_status(successor(state, prefix_affinity=2.0), 0.0)["prefixes"] == counted
