"""The fluid ledger behind Retry-After, by hand: what takes room, for how long, and whose it is."""

import numpy as np
import pytest

from planning.limits import make_limits
from routing.fleet_state import FleetState, recompute_load
from routing.returns import (
    BUCKETS,
    COLUMNS,
    KV,
    PREFILL,
    SEQUENCES,
    Ledger,
    add_claim,
    bucket_of,
    carry,
    emptiest,
    first_room,
    is_kept,
    make_ledger,
)
from tests.unit.routing.test_placement import LIMITS, fleet_of, new


def replicas(
    loads: list[int], limits: np.void = LIMITS, left: int = 60, **of_each: object
) -> tuple[FleetState, Ledger]:
    """Replicas with decodes that have ``left`` tokens to go, and the ledger that has them."""
    fleet = fleet_of(loads)
    fleet.limits[:] = limits
    for r, load in enumerate(loads):
        rows = fleet.tables[r, :load]
        for name, value in of_each.items():
            rows[name] = value
        rows["output_tokens"] = rows["emitted_tokens"] + left
        rows["computed_tokens"] = rows["prompt_tokens"] + rows["emitted_tokens"] - 1
        recompute_load(fleet, r)
    ledger = make_ledger(len(loads))
    carry(fleet, 0.0, ledger, np.arange(len(loads)))
    return fleet, ledger


def room(fleet: FleetState, ledger: Ledger, row: np.void, most_s: int = 30) -> tuple[int, int]:
    """``first_room`` of all replicas."""
    return first_room(fleet, ledger, row, 0.0, most_s, np.arange(len(fleet.replicas)))


def asked(output_tokens: int = 100, prompt_tokens: int = 20_000) -> np.void:
    row = new()[0]
    row["prompt_tokens"], row["output_tokens"], row["ttft_s"] = prompt_tokens, output_tokens, 20.0
    return row


def test_where_there_is_room_it_is_told_for_the_next_second() -> None:
    assert room(*replicas([1]), asked()) == (1, 0)


@pytest.mark.parametrize("limits", [make_limits(110_000), make_limits(200_000, max_running=1)], ids=["KV", "sequences"])
def test_a_full_replica_is_told_for_when_its_decodes_have_ended(limits: np.void) -> None:
    second, slot = room(*replicas([1], limits, prompt_tokens=90_500), asked())
    assert 3 <= second <= 5
    assert slot == 0
    assert room(*replicas([1], limits, prompt_tokens=90_500), asked(), 2)[0] == 0, "not in time"


def test_best_effort_takes_no_room() -> None:
    fleet, ledger = replicas([1], make_limits(110_000), prompt_tokens=90_500, best_effort=True)
    assert not ledger.carried.any()
    assert room(fleet, ledger, asked()) == (1, 0)


def test_of_several_with_room_the_least_busy_is_told() -> None:
    assert room(*replicas([12, 2, 12], left=600), asked()) == (1, 1)


def reserved(replica: int, at_s: float, **columns: float) -> tuple[np.ndarray, int]:
    """A claim of four seconds, and where it begins."""
    claim = np.zeros(COLUMNS)
    claim[SEQUENCES], claim[KV], claim[PREFILL] = (columns.get(name, 0.0) for name in ("sequences", "kv", "prefill"))
    return claim, bucket_of(at_s)


@pytest.mark.parametrize(("output_tokens", "is_in_the_way"), [(20, False), (200, True)])
def test_a_newcomer_is_in_the_way_of_those_told_only_while_it_lasts(output_tokens: int, is_in_the_way: bool) -> None:
    """One sequence at a time: told to come in 5 s, while the newcomer decodes for 1 s or for 10."""
    fleet, ledger = replicas([0], make_limits(200_000, max_running=1))
    claim, bucket = reserved(0, 5.0, sequences=1.0)
    add_claim(ledger.reserved, 0, bucket, claim, 16, 1.0)
    assert is_kept(fleet, ledger, asked(output_tokens, 500), 0.0, np.arange(1)).tolist() == [is_in_the_way]
    add_claim(ledger.reserved, 0, bucket, claim, 16, -1.0)
    assert is_kept(fleet, ledger, asked(output_tokens, 500), 0.0, np.arange(1)).tolist() == [False]


def test_a_newcomers_prompt_is_in_the_way_of_prompts_that_would_be_late_behind_it() -> None:
    fleet, ledger = replicas([0])
    claim, bucket = reserved(0, 0.5, sequences=1.0, prefill=0.5)
    add_claim(ledger.reserved, 0, bucket, claim, 16, 1.0)
    small, large = asked(10, 500), asked(10, 60_000)
    for row in (small, large):
        row["ttft_s"] = 0.8
    assert [is_kept(fleet, ledger, row, 0.0, np.arange(1))[0] for row in (small, large)] == [False, True]


def test_a_claim_wraps_around_the_ring_and_leaves_nothing_when_taken_out() -> None:
    ledger = make_ledger(1)
    claim, _ = reserved(0, 0.0, sequences=1.0, kv=10.0, prefill=0.5)
    add_claim(ledger.reserved, 0, BUCKETS - 2, claim, 4, 1.0)
    assert np.flatnonzero(ledger.reserved[0, :, SEQUENCES]).tolist() == [0, 1, BUCKETS - 2, BUCKETS - 1]
    assert np.flatnonzero(ledger.reserved[0, :, PREFILL]).tolist() == [BUCKETS - 2]
    add_claim(ledger.reserved, 0, BUCKETS - 2, claim, 4, -1.0)
    assert not ledger.reserved.any()


@pytest.mark.parametrize(("most", "told"), [(1, [1]), (2, [1, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])])
def test_the_emptiest_are_asked_in_order_of_slots(most: int, told: list[int]) -> None:
    fleet, _ = replicas([9, 1, 6, 3])
    assert emptiest(fleet, 0, most).tolist() == told
    fleet.replicas["is_open"][1] = False
    assert 1 not in emptiest(fleet, 0, most)


def test_what_was_promised_one_turn_of_the_ring_ago_is_nobodys_load() -> None:
    """The ring is longer than the horizon, and long outputs look beyond that."""
    fleet, ledger = replicas([30], left=100_000)
    others, _ = replicas([1], left=4)
    fleet.tables[:], fleet.replicas[:] = others.tables, others.replicas
    fresh = make_ledger(1)
    for known in (ledger, fresh):
        carry(fleet, 25.0, known, np.arange(1))
    assert np.array_equal(ledger.carried, fresh.carried)


def test_newcomers_leave_room_where_half_a_request_or_more_is_likely_to_come() -> None:
    fleet, ledger = replicas([0], make_limits(200_000, max_running=1))
    claim, bucket = reserved(0, 5.0, sequences=1.0)
    add_claim(ledger.reserved, 0, bucket, claim, 16, 1.0)
    told = [ledger._replace(share=share) for share in (0.4, 0.6)]
    row = asked(200, 500)
    assert [bool(is_kept(fleet, each, row, 0.0, np.arange(1))[0]) for each in told] == [False, True]
