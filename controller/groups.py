"""Requests of several sequences: admitted with all of them or with none. Pure."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec
import numpy as np

from controller import placement
from controller.decisions import NOT_HERE
from controller.mirror.slots import ReplicaSlots
from controller.placement import Pending, PlacementFleet
from planning.admission.plan import AdmitReason
from planning.limits import usable_kv_tokens
from protocol.messages import Decision, Verdict
from routing.placement import NOWHERE, tier_distance
from routing.quick_check import QUICK_CHECK_UTILIZATION

CHUNK = 16  # sequences placed at a time: the first that finds no room ends the search for all


def of_groups(asking: Sequence[Pending]) -> tuple[list[Pending], list[list[Pending]]]:
    """Requests of one sequence, and those of several, each in order of arrival."""
    singles, groups = [], dict[str, list[Pending]]()
    for p in asking:
        if p.request.group:
            groups.setdefault(p.request.group, []).append(p)
        else:
            singles.append(p)
    for first, *others in groups.values():
        first.siblings = others
    return singles, list(groups.values())


def decide_together(
    fleet: PlacementFleet, groups: Sequence[Sequence[Pending]], now_s: float, fall_back: Callable[[Pending], Decision]
) -> dict[str, Decision]:
    """Place each group as a whole; by request id, the decisions for the sequences of those that found no room.

    ``fall_back`` decides for one sequence that has no place.
    """
    decisions, slots = dict[str, Decision](), fleet.slots
    for group in groups:
        may_join = fleet.candidates(group[0].tier)
        if sum(p.slot == NOWHERE for p in group) <= most_sequences(slots, group, may_join, now_s):
            _place(fleet, group, now_s)
        else:
            _object(group, AdmitReason.TTFT_UNATTAINABLE.value)
        if any(p.slot == NOWHERE for p in group):
            most_idle = partial(most_sequences, slots, group, may_join, now_s, idle=True)
            group[0].is_possible = len(group) <= most_idle()
            if not group[0].is_possible:
                group[0].may_become_possible = len(group) <= most_idle(at_best=True)
            decisions |= {d.request_id: d for d in _best_effort_or_refuse(slots, group, fall_back)}
    return decisions


def _place(fleet: PlacementFleet, group: Sequence[Pending], now_s: float) -> None:
    """Give the sequences places one after the other, until one finds none and no replica joins its tier for it."""
    failed: Pending | None = None
    while failed is None or failed.slot != NOWHERE:
        failed = None
        for start in range(0, len(group), CHUNK):
            chunk = group[start : start + CHUNK]
            placement.place_admitted(fleet.slots, chunk, now_s, fleet.max_hops)
            if failed := next((p for p in chunk if p.slot == NOWHERE), None):
                break
        if failed is None:
            return
        placement.recruit_replica(fleet, [failed], now_s)
    _object(group, failed.reason)


def _object(group: Sequence[Pending], reason: str) -> None:
    """One sequence found no room: this stands against all of them."""
    for p in group:
        p.reason, p.is_checked = reason, True


def _best_effort_or_refuse(
    slots: ReplicaSlots, group: Sequence[Pending], fall_back: Callable[[Pending], Decision]
) -> list[Decision]:
    """One decision for all: the first sequence's, with its siblings in their places, because the answer when there
    will be room depends on them."""
    first, others = group[0], group[1:]
    _take_back(slots, [first])
    decision = fall_back(first)
    _take_back(slots, others)
    if decision.verdict in (*NOT_HERE, Verdict.PENDING):
        return [msgspec.structs.replace(decision, request_id=p.request.request_id) for p in group]
    told = dict(verdict=decision.verdict, tier=decision.tier, reason=decision.reason)
    decisions = [decision]
    for p in others:
        p.row["best_effort"] = True
        other = fall_back(p)
        decisions.append(msgspec.structs.replace(other, **told) if other.replica else other)
    return decisions


def _take_back(slots: ReplicaSlots, group: Sequence[Pending]) -> None:
    """Give up places of a group that has not found enough of them."""
    for p in group:
        if p.slot != NOWHERE:
            slots.remove(p.slot, int(p.row["id"]))
            p.slot = NOWHERE


def most_sequences(
    slots: ReplicaSlots,
    group: Sequence[Pending],
    may_join: Collection[int],
    now_s: float,
    idle: bool = False,
    at_best: bool = False,
) -> int:
    """How many sequences the open replicas of the tier, and those that ``may_join`` it, could hold, by cached sums.

    An upper bound: seats, KV tokens for the prompts alone, and prompts that can be computed in time; ``idle``: if
    nothing else were there and the request came now; ``at_best``: without what may pass, its tier's margin and what
    makes replicas far slower than their profiles say.
    """
    state, limits, rows = (
        slots.fleet_state.replicas,
        slots.fleet_state.limits,
        np.array([p.row for p in group]),
    )
    suited = [
        tier_distance(int(tier), group[0].tier) >= 0 or slot in may_join for slot, tier in enumerate(state["tier"])
    ]
    usable = state["is_open"] & np.array(suited)
    num_uncomputed_tokens = max(1, int((rows["prompt_tokens"] - rows["computed_tokens"]).min()))
    allowed_s = np.minimum(rows["ttft_s"], rows["deadline_s"] - rows["arrival_s"])
    left_s = allowed_s if idle else allowed_s - (now_s - rows["arrival_s"])
    window_s = max(0.0, float(left_s.max())) + (group[0].margin_s if at_best else 0.0)
    held, taken = (0.0, 0) if idle else (state["held_tokens"], state["count"] - state["best_effort"])
    kv_tokens = usable_kv_tokens(limits) - held
    each_s = np.maximum(num_uncomputed_tokens * (slots.best_token_s() if at_best else state["prompt_token_s"]), 1e-12)
    in_time = QUICK_CHECK_UTILIZATION * (window_s + limits["max_iteration_s"]) / each_s + 1.0
    room = np.minimum(np.minimum(kv_tokens // num_uncomputed_tokens, limits["max_running"] - taken), in_time)
    return int(np.maximum(room, 0.0)[usable].sum())
