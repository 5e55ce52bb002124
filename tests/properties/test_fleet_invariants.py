"""Placement with dynamic roles, against asking every replica by itself (screen and replay) before each decision.

1. A request is never placed on a replica of a looser tier, nor on one of the pool that stays there.
2. Inside its tier it goes to the replica that attains it and is wanted most: under ``load_gradient`` the most loaded,
   under ``marginal_load`` the one whose squared load grows least.
3. It is promoted to a tighter tier only when no replica of its own tier attains it (lazy promotion).
4. A replica is called up only when no replica of its own tier nor of a tighter one attains it; none is only when
   none of those that may join attains it.
5. After a quiet period ``load_gradient`` builds up anew: a replica gets its first request when those before are full.
6. Roles, reservations and rows agree after every event.
"""

from typing import NamedTuple

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from controller.fleet import Fleet
from controller.mirror.replica_model import admission_row
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from controller.scaling.role import Kind
from controller.scaling.roles import DynamicRoles
from controller.scaling.tiers import Tier, TierTable
from planning.admission.search import ADMITTED
from planning.engine import EngineModel
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Decision, Outcome, Report, Slo, Verdict, request_uid
from routing.fleet_state import advance_fleet
from routing.placement import check_replica
from routing.quick_check import quick_check
from routing.scores import score_replicas
from tests.support.examples import examples

PROFILE = "h100_sxm__llama-3.1-8b"
SLOS = [Slo(0.3, 0.02, tier="tight"), Slo(1.0, 0.05, tier="middle"), Slo(3.0, 0.1, tier="loose")]
TABLE = TierTable.of(1, [*(Tier(slo.tier, slo.ttft_s, slo.tpot_s) for slo in SLOS), Tier("flex", best_effort=True)])


class World:
    """A fleet whose replicas run exactly as the model says."""

    def __init__(self, replicas: int, routing: str) -> None:
        options = FleetOptions(
            routing=routing,
            max_hops=replicas + 1,
            length_prior_tokens=60.0,
            allocation=AllocationOptions("dynamic", idle_s=1.0),
        )
        self.fleet = Fleet(options, TABLE, load_profile)
        self.now_s, self.sent, self.names = 0.0, 0, [f"r{i}" for i in range(replicas)]
        self.running: dict[str, Decision] = {}
        for name in self.names:
            self.fleet.report(Report(name, "1", 1, PROFILE, 60_000, 0, 256, 2048, 0.0), 0.0)

    def wait(self, seconds: float, ending: int = 0) -> None:
        """Time passes, and the oldest requests end."""
        self.now_s += seconds
        for request_id in list(self.running)[:ending]:
            told = self.running.pop(request_id)
            self.fleet.on_outcome(
                Outcome(request_id, told.tier, told.tier, "stop", True, 0, 0, 0, 0, 0, 60, told.verdict), self.now_s
            )
        for replica in self.fleet.replicas.values():
            replica.seen_s = self.now_s  # reports would say what the mirror shows
            replica._reserved_s.clear()
        self.fleet._allocate(self.now_s)

    def ask(self, slo: Slo, prompt_tokens: int) -> tuple[AdmissionRequest, Decision]:
        self.sent += 1
        asked = AdmissionRequest(str(self.sent), prompt_tokens, 120, slo)
        (decision,) = self.fleet.admit([asked], self.now_s)
        if held := self.fleet.held.pending.pop(request_uid(asked.request_id), None):  # as if it were sent at once
            name = self.fleet.by_slot[held.slot].name
            decision = msgspec.structs.replace(decision, verdict=Verdict.ADMITTED, replica=name)
        if decision.verdict == Verdict.ADMITTED:
            self.running[decision.request_id] = decision
        self.fleet.check_integrity()
        assert isinstance(self.fleet.allocation.roles, DynamicRoles)
        self.fleet.allocation.roles.check_integrity()
        return asked, decision


class Before(NamedTuple):
    """A replica before a decision."""

    position: int
    kind: Kind
    score_replica: float  # of the request, to be placed there
    attains: bool


def look(world: World, slo: Slo, prompt_tokens: int) -> dict[str, Before]:
    """What each replica would say, asked by itself."""
    fleet, roles = world.fleet, world.fleet.allocation.roles
    fleet._open(world.now_s)
    advance_fleet(fleet.slots.fleet_state, world.now_s)
    fleet.slots.allocate(1)
    asked = AdmissionRequest("asked", prompt_tokens, 120, slo)
    row = admission_row(asked, TABLE.of_request(slo), fleet.lengths, world.now_s)
    told = {}
    for name, replica in fleet.replicas.items():
        fleet_state, slot, asks = fleet.slots.fleet_state, replica.slot, row[None][0]
        coef, limits = fleet_state.pessimistic_coefs[slot], fleet_state.limits[slot]
        attains = quick_check(EngineModel(coef, limits), replica.state[0], asks, world.now_s) == ADMITTED
        attains = attains and check_replica(fleet_state, slot, asks, world.now_s) == ADMITTED
        wanted = score_replicas(fleet_state, asks, world.now_s, fleet.policy.rule)[slot]
        told[name] = Before(roles.position(name), roles.role(name).kind, float(wanted), attains)
    return told


events = st.lists(
    st.tuples(st.sampled_from(SLOS), st.integers(50, 4000), st.sampled_from([0.0, 0.01, 0.1, 1.5]), st.integers(0, 3)),
    max_size=40,
)


@examples(80)
@given(events, st.sampled_from(["load_gradient", "marginal_load"]))
def test_every_placement_follows_tier_wish_and_laziness(
    events: list[tuple[Slo, int, float, int]], routing: str
) -> None:
    world = World(4, routing)
    for slo, prompt_tokens, pause_s, ending in events:
        world.wait(pause_s, ending)
        before, own = look(world, slo, prompt_tokens), TABLE.of_request(slo)
        may_join = world.fleet.allocation.candidates(own)
        _, decision = world.ask(slo, prompt_tokens)
        if decision.verdict != Verdict.ADMITTED:
            assert not [name for name in may_join if before[name].attains]  # 4
            continue
        chosen = before[decision.replica]
        roles = world.fleet.allocation.roles
        assert roles.role(decision.replica).kind == Kind.SERVES
        assert roles.position(decision.replica) <= own  # 1
        serving = [told for told in before.values() if told.kind == Kind.SERVES and told.attains]
        if chosen.kind == Kind.SERVES and chosen.position == own:
            assert (
                chosen.score_replica >= max(told.score_replica for told in serving if told.position == own) - 1e-9
            )  # 2
        elif chosen.kind == Kind.SERVES:
            assert not [told for told in serving if told.position == own]  # 3
        else:
            assert not [told for told in serving if told.position <= own]  # 4


@examples(10)
@given(st.integers(300, 3000), st.sampled_from(SLOS))
def test_after_a_quiet_period_replicas_fill_one_after_the_other(prompt_tokens: int, slo: Slo) -> None:
    world = World(3, "load_gradient")
    for _ in range(12):
        world.ask(slo, prompt_tokens)
    world.wait(30.0, ending=len(world.running))
    world.wait(2.0)
    assert not world.fleet.allocation.roles.names(Kind.SERVES), "all have gone back to the pool"
    used: list[str] = []
    for _ in range(60):
        before = look(world, slo, prompt_tokens)
        _, decision = world.ask(slo, prompt_tokens)
        if decision.verdict != Verdict.ADMITTED:
            break
        if decision.replica not in used:
            assert not any(before[name].attains for name in used)  # 5
            used.append(decision.replica)
        loads = [float(world.fleet.replicas[name].state["load"][0]) for name in used[:-1]]
        assert all(load > 0.0 for load in loads)
        world.now_s += 0.05
    counts = np.array([len(world.fleet.replicas[name].table) for name in used])
    assert counts.min() >= 1
