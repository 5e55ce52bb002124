"""The controller's use of ``routing.placement``: request by request, or as a set where a burst does not fit."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from controller.chances import are_likely, plan_chances
from controller.disaggregation.phases import Phase
from controller.mirror.prefix_affinity import NOTHING_CACHED
from controller.mirror.replica_model import VirtualReplica
from controller.mirror.slots import ReplicaSlots
from controller.options import ARRIVAL, FleetOptions
from controller.scaling.allocation import Allocation
from planning.admission.plan import REASONS, AdmissionOptions, AdmissionPlan, plan_admission
from planning.admission.search import is_late_beside
from planning.engine import EngineModel
from planning.forecast.rollout import TOLERANCE_S
from planning.tables import copied, to_table
from protocol.messages import AdmissionRequest
from routing.best_effort import idlest_open
from routing.fleet_state import set_all_drafts
from routing.placement import NO_SCORES, NONE_CACHED, NOWHERE, PLACEMENT, CandidateOrder, place, tier_distance
from routing.policy import best_scored
from routing.scores import score_replicas

MOST_SETS = 2  # replicas that are asked for a better set of a burst, per request without a place


@dataclass(frozen=True)
class PlacementFleet:
    """What requests are placed on: the replicas' slots, and who may join which tier."""

    slots: ReplicaSlots
    allocation: Allocation
    replicas: Mapping[str, VirtualReplica]
    options: FleetOptions

    @property
    def max_hops(self) -> int:
        """Exact checks per request."""
        return self.options.max_hops

    def candidates(self, tier: int) -> dict[int, str]:
        """Replicas that may join the tier, in the order to be asked: slots and names."""
        known = (name for name in self.allocation.candidates(tier) if name in self.replicas)
        return {self.replicas[name].slot: name for name in known}


@dataclass
class Pending:
    """A request to be decided and, once it has one, its place."""

    request: AdmissionRequest
    tier: int
    row: np.ndarray  # REQUEST[]
    scores: np.ndarray  # preference of each slot, or empty for what the rule says at the time
    rule: int  # of ``routing.scores``
    held: np.ndarray  # tokens of its prompt that each slot presumably holds, or empty where none does
    cached: np.ndarray = field(default_factory=lambda: NOTHING_CACHED)  # those certain to be there; or empty, alike
    slot: int = NOWHERE
    hops: int = 0
    reason: str = "no_replica"
    is_checked: bool = False
    is_returning_on_time: bool = False  # at the time that an earlier refusal told
    siblings: Sequence["Pending"] = ()  # of the first sequence of a request: the others
    ingress: str = ""  # that asks, where it can be told of a recall
    is_possible: bool = True  # an idle fleet could hold the request with all its sequences
    may_become_possible: bool = True  # or could without what may pass: a margin, a slow spell
    begin_s: float = -np.inf  # predicted start of its first iteration
    first_s: float = np.inf  # predicted time of the first token, and seconds per token after it
    tpot_s: float = np.inf
    chance: float = 1.0  # that the first token comes in time
    margin_s: float = 0.0  # by how much earlier than asked it is planned
    phase: Phase | None = None  # the part of it that is asked about, in a disaggregated fleet
    scores_as_best_effort: np.ndarray | None = None  # where room kept for others takes slots off it while promised

    @property
    def is_best_effort(self) -> bool:
        return bool(self.row["best_effort"])

    def computed_tokens_at(self, slot: int) -> int:
        """Tokens that need not be computed on this slot: they came with it, or are certain to be cached there."""
        return int(self.cached[slot]) if len(self.cached) else int(self.row["computed_tokens"])

    def row_at(self, slot: int) -> np.ndarray:
        """The request as it is on this slot (REQUEST[])."""
        row = copied(self.row)
        row["computed_tokens"] = self.computed_tokens_at(slot)
        return row

    @property
    def is_new(self) -> bool:
        """Whether no replica has begun it yet."""
        return self.request.emitted_tokens == 0

    def all_scores(self, slots: ReplicaSlots, now_s: float) -> np.ndarray:
        """Its preference of each slot, said in full."""
        row = self.row[None][0]
        return self.scores if len(self.scores) else score_replicas(slots.fleet_state, row, now_s, self.rule)

    def exclude_where_others_are(self, slots: ReplicaSlots, excluded: Sequence[int], now_s: float) -> None:
        """Want none of these slots, unless no other is open."""
        is_open = slots.fleet_state.replicas["is_open"]
        if is_open.sum() > is_open[excluded].sum():
            self.exclude_slots(slots, excluded, now_s)

    def exclude_slots(self, slots: ReplicaSlots, excluded: Sequence[int], now_s: float) -> None:
        """Want none of these slots."""
        if not len(excluded):
            return
        self.scores = self.all_scores(slots, now_s).astype(np.float64)
        self.scores[excluded] = -np.inf


def place_without_check(slots: ReplicaSlots, p: Pending, affinity: float, now_s: float) -> None:
    """Give a request the replica it wants most, whatever that does to anybody's objective."""
    p.slot = best_scored(slots.fleet_state.replicas, _with_affinity(slots, p, affinity, now_s))
    if p.slot != NOWHERE:
        slots.add(p.slot, p.row_at(p.slot))


def idlest_slot(slots: ReplicaSlots, p: Pending, is_usable: np.ndarray) -> int:
    """Of the usable slots (bool[R]) the one where best effort has the least to compute before its first token;
    ``NOWHERE`` where none is open."""
    return int(idlest_open(slots.fleet_state, p.held, p.scores, is_usable))


def _with_affinity(slots: ReplicaSlots, p: Pending, affinity: float, now_s: float) -> np.ndarray:
    """The preference as it stands now, and ``affinity`` more for a whole prompt."""
    scores = p.all_scores(slots, now_s)
    return scores + affinity * p.held / p.request.prompt_tokens if len(p.held) else scores


def place_each(
    fleet: PlacementFleet, asking: Sequence[Pending], earlier: Collection[int], affinity: float, now_s: float
) -> None:
    """Place requests that stand for themselves; ``affinity`` as of ``place_by_prefix``. Which of a burst to take is
    asked once: not of those that came ``earlier``, by uid, and ask again several times a second."""
    if asking:
        place_by_prefix(fleet.slots, asking, affinity, now_s)
        place_admitted(fleet.slots, asking, now_s, fleet.max_hops)
        recruit_replica(fleet, asking, now_s)
    newcomers = [p for p in asking if int(p.row["id"]) not in earlier]
    if len(newcomers) > 1 and fleet.options.selection != ARRIVAL:
        reoptimize_burst(fleet, newcomers, now_s)


def place_by_prefix(slots: ReplicaSlots, asking: Sequence[Pending], affinity: float, now_s: float) -> None:
    """Requests whose prompt some replica presumably holds: one check each, of the replica that affinity puts first.

    Who is not placed by it is placed as if there were no affinity, so that it costs nobody a promise.
    """
    known = [p for p in asking if len(p.held)]
    plain = [p.scores for p in known]
    for p in known:
        p.scores = _with_affinity(slots, p, affinity, now_s)
    place_admitted(slots, known, now_s, 1)
    for p, scores in zip(known, plain, strict=True):
        p.scores = scores


def place_on(slots: ReplicaSlots, p: Pending, slot: int, now_s: float) -> None:
    """Place a request on this replica, if that can promise it."""
    scores, p.scores = p.scores, np.full(len(slots.fleet_state.replicas), -np.inf)
    p.scores[slot] = 0.0
    place_admitted(slots, [p], now_s, 1)
    p.scores = scores


def place_admitted(slots: ReplicaSlots, asking: Sequence[Pending], now_s: float, max_hops: int) -> None:
    """Place and commit, of those without a place, what some replica can promise (``routing.placement.place``)."""
    asking = [p for p in asking if p.slot == NOWHERE]
    if not asking:
        return
    rows, placements = to_table([p.row for p in asking]), np.zeros(len(asking), dtype=PLACEMENT)
    scores, is_any_open = _all_scores(slots, asking, now_s), slots.is_any_open
    order = CandidateOrder(scores, asking[0].rule, max_hops, _all_cached(slots, asking), slots.lag_s > 0.0)
    place(slots.fleet_state, rows, now_s, order, placements)
    for p, (slot, reason, hops, *predicted) in zip(asking, placements.tolist(), strict=True):
        p.slot, p.is_checked, p.hops = slot, True, max(0, hops - 1)
        p.begin_s, p.first_s, p.tpot_s, p.chance = predicted
        if is_any_open:
            p.reason = REASONS[reason].value


def _all_scores(slots: ReplicaSlots, asking: Sequence[Pending], now_s: float) -> np.ndarray:
    """f8[k, R], or ``NO_SCORES`` where nobody says any."""
    if not any(len(p.scores) for p in asking):
        return NO_SCORES
    return np.array([p.all_scores(slots, now_s) for p in asking], dtype=np.float64)


def _all_cached(slots: ReplicaSlots, asking: Sequence[Pending]) -> np.ndarray:
    """i8[k, R], or ``NONE_CACHED`` where nobody's prompt is anywhere for certain."""
    if not any(len(p.cached) for p in asking):
        return NONE_CACHED
    replicas = len(slots.fleet_state.replicas)
    return np.array(
        [p.cached if len(p.cached) else np.full(replicas, p.row["computed_tokens"]) for p in asking], np.int64
    )


def recruit_replica(fleet: PlacementFleet, asking: Sequence[Pending], now_s: float) -> None:
    """For requests that found no room in their own tier nor in a tighter one, replicas join their tier: from the
    pending list, then from the pool (PolyServe section 4.3). One joins only if it can promise what is asked."""
    left = sorted((p for p in asking if p.slot == NOWHERE), key=lambda p: p.tier)
    while left:
        p = left.pop(0)
        names = fleet.candidates(p.tier)
        _try_as_tier(fleet.slots, p, [slot for slot in names if is_wanted(p, slot)], now_s, fleet.max_hops)
        if p.slot == NOWHERE:
            continue
        fleet.allocation.join(names[p.slot], p.tier, now_s)
        if left:
            place_admitted(fleet.slots, left, now_s, fleet.max_hops)
            left = [q for q in left if q.slot == NOWHERE]


def _try_as_tier(slots: ReplicaSlots, p: Pending, candidates: Sequence[int], now_s: float, max_hops: int) -> None:
    """Place the request on the first of these replicas that can promise it as one of its tier, or nowhere."""
    if not candidates:
        return
    tiers, scores, hops = slots.fleet_state.replicas["tier"], p.scores, p.hops
    before, tiers[candidates] = tiers[candidates], p.tier
    p.scores = np.full(len(tiers), -np.inf)
    p.scores[candidates] = -np.arange(len(candidates))
    place_admitted(slots, [p], now_s, max_hops)
    tiers[candidates] = before
    if p.slot != NOWHERE:
        tiers[p.slot] = p.tier
    p.scores, p.hops = scores, hops + 1 + p.hops


def reoptimize_burst(fleet: PlacementFleet, asking: Sequence[Pending], now_s: float) -> None:
    """A burst that does not fit as a whole: let the DP choose the best set for each replica that took a part.

    It chooses among that part and what found no place, beside all earlier promises (SLOs-Serve section 3.2.1), and is
    followed where its set is worth more. Who returns when it was told keeps its place.
    """
    slots, asked = fleet.slots, Counter[int]()
    for slot in dict.fromkeys(p.slot for p in asking if p.slot != NOWHERE and not p.is_returning_on_time):
        tier = int(slots.fleet_state.replicas["tier"][slot])
        here = [p for p in asking if p.slot == slot and not p.is_returning_on_time]
        left = [p for p in asking if p.slot == NOWHERE and asked[id(p)] < MOST_SETS]
        left = [p for p in left if tier_distance(tier, p.tier) >= 0 and is_wanted(p, slot)]
        if left:
            asked.update(map(id, left))
            _choose_set(fleet, slot, here, left, now_s)


def is_wanted(p: Pending, slot: int) -> bool:
    return len(p.scores) == 0 or p.scores[slot] > -np.inf  # by the routing policy, which may say never


def _choose_set(fleet: PlacementFleet, slot: int, here: list[Pending], left: list[Pending], now_s: float) -> None:
    """Put the better set in place of ``here`` if there is one."""
    slots = fleet.slots
    table, both = slots.rows(slot), [*here, *left]
    own = {int(p.row["id"]) for p in here}
    stays = np.array([uid not in own for uid in table["id"].tolist()], dtype=np.bool_)
    rows, engine = joining_rows(slots, slot, both), pessimistic_engine(slots, slot)
    start_s = next_start_s(slots, slot, now_s)
    if all(is_late_beside(engine, table, stays, row, start_s) for row in rows[len(here) :]):
        return
    promised, options = table[stays], AdmissionOptions(searches=fleet.options.searches)
    plan = plan_admission(engine, promised, rows, start_s, options)
    if float(rows["value"][plan.accepted].sum()) <= sum(float(p.row["value"]) for p in here) + TOLERANCE_S:
        return
    chances = plan_chances(slots.fleet_state, slot, rows, plan, now_s)
    if not are_likely(slots.fleet_state, slot, rows, plan, chances):
        return
    slots.put(slot, np.concatenate([promised, rows[plan.accepted]]))
    for k, p in enumerate(both):
        note_plan(p, plan, k, slot, chances)


def joining_rows(slots: ReplicaSlots, slot: int, asking: Sequence[Pending]) -> np.ndarray:
    """The requests as they would be on the slot's replica (REQUEST[k]): it may speculate for them."""
    rows = to_table([p.row_at(slot) for p in asking])
    set_all_drafts(slots.fleet_state, slot, rows)
    return rows


def note_plan(p: Pending, plan: AdmissionPlan, k: int, slot: int, chances: np.ndarray) -> None:
    """What a plan for this slot says of the request, its ``k``-th new one; ``chances`` as of ``plan_chances``."""
    p.slot, p.reason, p.chance = (slot if plan.accepted[k] else NOWHERE), plan.reasons[k].value, float(chances[k])
    p.begin_s, p.tpot_s = float(plan.begin_s[k]), float(plan.predicted_tpot_s[k])
    p.first_s = float(plan.predicted_ttft_s[k] + p.row["arrival_s"])


def pessimistic_engine(slots: ReplicaSlots, slot: int) -> EngineModel:
    """The model by which the slot's replica makes promises."""
    return EngineModel(slots.fleet_state.pessimistic_coefs[slot], slots.fleet_state.limits[slot])


def next_start_s(slots: ReplicaSlots, slot: int, now_s: float) -> float:
    """When the slot's replica can begin another iteration."""
    return max(now_s, float(slots.fleet_state.replicas["free_at_s"][slot]))
