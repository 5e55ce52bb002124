"""Roles under random events.

1. Every replica that is there has exactly one role, no other has one.
2. A replica comes to serve a tier only without requests of tighter tiers on it.
3. No tier exceeds its maximum after a step; none lacks its minimum while the pool has a replica that reports.
4. A silent replica's role does not change, except that its tier may be removed or it may be drained.
5. A draining replica is never given a role but by being taken back.
"""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controller.scaling.role import Kind, ReplicaView
from controller.scaling.roles import DynamicRoles, RoleOptions
from controller.scaling.tiers import Tier, TierTable
from protocol.messages import Slo

PACES_S = {"tight": 0.02, "middle": 0.05, "loose": 0.1}
bounds = st.tuples(st.integers(0, 2), st.integers(0, 3)).map(lambda b: (b[0], b[1] and max(b)))


def make_table(version: int, tiers: dict[str, tuple[int, int]], pool_low: int) -> TierTable:
    promising = [
        Tier(name, 1.0, PACES_S[name], min_replicas=low, max_replicas=high) for name, (low, high) in tiers.items()
    ]
    return TierTable.of(version, [*promising, Tier("batch", best_effort=True, min_replicas=pool_low)])


def claim(roles: DynamicRoles, position: int, views: list[ReplicaView], now_s: float) -> str | None:
    """What placement does where a tier has no room and the first candidate can promise what is asked."""
    chosen = next(iter(roles.candidates(position, views)), None)
    if chosen is not None:
        roles.join(chosen, position, now_s)
    return chosen


class Fleet(RuleBasedStateMachine):
    """Replicas come, go, fall silent, take and end requests; tiers change; roles follow."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.born, self.version = 0.0, itertools.count(), 1
        self.requests: dict[str, dict[str, int]] = {}  # replica -> tier of the request's promise -> count
        self.silent: set[str] = set()

    @initialize(tiers=st.dictionaries(st.sampled_from(sorted(PACES_S)), bounds, min_size=1), low=st.integers(0, 1))
    def start(self, tiers: dict[str, tuple[int, int]], low: int) -> None:
        self.requests = {f"r{next(self.born)}": {} for _ in range(3)}
        self.roles = DynamicRoles(make_table(1, tiers, low), RoleOptions(idle_s=2.0))

    def views(self) -> list[ReplicaView]:
        told = []
        for name, held in self.requests.items():
            counts = [0] * self.roles.table.pool
            for tier, count in held.items():
                if tier != "batch":
                    counts[self.roles.table.of_request(Slo(tpot_s=PACES_S[tier], tier=tier))] += count
            told.append(ReplicaView(name, tuple(counts), held.get("batch", 0), is_reporting=name not in self.silent))
        return told

    @rule()
    def joins(self) -> None:
        if len(self.requests) < 4:
            self.requests[f"r{next(self.born)}"] = {}

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[name]
        self.silent.discard(name)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def falls_silent_or_speaks(self, data: st.DataObject) -> None:
        self.silent ^= {data.draw(st.sampled_from(sorted(self.requests)))}

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def takes_a_request(self, data: st.DataObject) -> None:
        """As placement does: its own tier's or a looser one's."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if self.roles.is_open(name):
            allowed = [tier.name for tier in self.roles.table.tiers[self.roles.position(name) :]]
            for tier in data.draw(st.lists(st.sampled_from(allowed), min_size=1, max_size=3)):
                self.requests[name][tier] = self.requests[name].get(tier, 0) + 1

    @precondition(lambda self: any(self.requests.values()))
    @rule(data=st.data())
    def ends_a_request(self, data: st.DataObject) -> None:
        held = self.requests[data.draw(st.sampled_from(sorted(n for n, held in self.requests.items() if held)))]
        tier = data.draw(st.sampled_from(sorted(held)))
        held[tier] -= 1
        if not held[tier]:
            del held[tier]

    @rule(tiers=st.dictionaries(st.sampled_from(sorted(PACES_S)), bounds, min_size=1), low=st.integers(0, 1))
    def resizes(self, tiers: dict[str, tuple[int, int]], low: int) -> None:
        self.version += 1
        self.roles.set_table(make_table(self.version, tiers, low), self.now_s)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), back=st.booleans())
    def drains_or_takes_back(self, data: st.DataObject, back: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        before = self._before()
        if back:
            self.roles.restore(name, self.views(), self.now_s, "asked")
            self._check_moves(before, taken_back=name)
        else:
            self.roles.drain(name, self.now_s, "asked")

    @rule(data=st.data())
    def a_tier_has_no_room(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, self.roles.table.pool - 1))
        before = self._before()
        chosen = claim(self.roles, position, self.views(), self.now_s)
        self._check_moves(before)
        if chosen is not None:
            assert self.roles.position(chosen) == position
            tier = self.roles.table.tiers[position].name
            self.requests[chosen][tier] = self.requests[chosen].get(tier, 0) + 1
            assert self.roles.count(position) <= self.roles.table.tiers[position].high

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        before, views = self._before(), self.views()
        self.roles.step(views, self.now_s)
        self._check_moves(before)
        assert {name for kind in Kind for name in self.roles.names(kind)} == set(self.requests)  # 1
        spare = [n for n in self.roles.names(Kind.POOL) if n not in self.silent]
        for position in range(self.roles.table.pool):  # 3
            tier = self.roles.table.tiers[position]
            silent = sum(n in self.silent for n in self.roles.names(Kind.SERVES, tier.name))
            assert self.roles.count(position) <= max(tier.high, silent)
            assert self.roles.count(position) >= tier.low or not spare

    def _before(self) -> dict[str, str]:
        return {name: str(self.roles.role(name)) for kind in Kind for name in self.roles.names(kind)}

    def _check_moves(self, before: dict[str, str], taken_back: str = "") -> None:
        for view in self.views():
            role = self.roles.role(view.name)
            if view.name not in before or str(role) == before[view.name]:
                continue
            if role.kind == Kind.SERVES:
                assert view.tightest >= self.roles.position(view.name)  # 2
            assert view.is_reporting  # 4
            assert before[view.name] != "draining" or view.name == taken_back  # 5

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "roles"):
            self.roles.check_integrity()


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
