"""The requests of one replica as its reports tell them: each in full once, after that only how far it is. Pure.

A report names what it holds: new requests in full (``protocol.messages.Progress``), known ones as packed positions
(``protocol.messages.POSITION``). Where it moves a request that was never told here, it is refused as a whole, and the
replica tells everything anew.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numba import njit

from controller.lengths.estimate import ASK_EVERY_TOKENS
from controller.lengths.fleet_lengths import FleetLengths
from controller.scaling.tiers import TierTable
from planning.tables import REQUEST, RequestTable, copied, request_table, stacked
from protocol.messages import INF, POSITION, Progress, Report, request_uid

SO_FAR = "emitted_tokens", "output_tokens", "output_bound_tokens"  # what lengths are asked by, beside what was told
NO_BOUNDS = INF, INF, INF
NO_RESERVATIONS: Mapping[int, float] = {}
LOOK_TOKENS = ASK_EVERY_TOKENS // 2  # after so many, an answer asked for may have come


@njit(cache=True)
def _move_on(
    known: RequestTable, is_live: np.ndarray, positions: np.ndarray, rows: RequestTable, is_due: np.ndarray
) -> tuple[np.ndarray, int]:
    """Copy the known request of every position (POSITION[n]) into ``rows`` (REQUEST[n]), as far as it is now.

    Both are mostly in the same order. ``is_due`` (bool[n]) tells whose length is to be looked up again: of those that
    were decided here (``is_live``, one per known request) now and then, of others when they have outlived it. Returns
    ``is_live`` of the positions, and how many are not known.
    """
    still_live = np.zeros(len(positions), dtype=np.bool_)
    at, unknown = 0, 0
    for i in range(len(positions)):
        position, found = positions[i], -1
        for j in range(len(known)):
            k = at + j if at + j < len(known) else at + j - len(known)
            if known[k]["id"] == position["id"]:
                found = k
                break
        if found < 0:
            unknown += 1
            continue
        at, rows[i] = found + 1, known[found]
        row, emitted = rows[i], position["emitted_tokens"]
        still_live[i] = is_live[found]
        comes_by = is_live[found] and emitted // LOOK_TOKENS > row["emitted_tokens"] // LOOK_TOKENS
        is_due[i] = comes_by or emitted >= row["output_tokens"]
        if row["running"] and not position["running"]:
            row["preempted_at"] = emitted + 1
        row["computed_tokens"], row["emitted_tokens"] = position["computed_tokens"], position["emitted_tokens"]
        row["running"] = position["running"]
        row["output_tokens"] = max(row["output_tokens"], emitted + 1)
        row["output_bound_tokens"] = max(row["output_bound_tokens"], row["output_tokens"])
    return still_live, unknown


@njit(cache=True)
def only_in(table: RequestTable, other: RequestTable) -> np.ndarray:
    """The ids of ``table`` that ``other`` has not (i8[k]); quick where both are mostly in the same order."""
    found, count, at = np.empty(len(table), dtype=np.int64), 0, 0
    for i in range(len(table)):
        is_there = False
        for j in range(len(other)):
            k = at + j if at + j < len(other) else at + j - len(other)
            if other[k]["id"] == table[i]["id"]:
                is_there, at = True, k + 1
                break
        if not is_there:
            found[count] = table[i]["id"]
            count += 1
    return found[:count]


class ReportedRequests:
    """What one replica has told of its requests; times count from its birth, so that no clock is compared."""

    def __init__(self) -> None:
        self._known = request_table(0)  # ``arrival_s`` from the replica's birth, ``deadline_s`` from arrival
        self._is_live = np.zeros(0, dtype=np.bool_)  # of each known one, whether it was decided here
        self._told: dict[int, Progress] = {}  # as they were told in full, by uid

    def forget(self) -> None:
        """Have everything told anew: what was made of it holds no more, as the tiers of another table."""
        self._known, self._is_live = request_table(0), np.zeros(0, dtype=np.bool_)

    def take(
        self,
        report: Report,
        lengths: FleetLengths,
        tiers: TierTable,
        now_s: float,
        reserved_s: Mapping[int, float] = NO_RESERVATIONS,
    ) -> np.ndarray | None:
        """All that it holds, as planning rows (REQUEST[n]) on this clock; none where a request is moved that was never
        told. Those told for the first time came when they were decided (``reserved_s``, by uid), if they were here."""
        positions = np.frombuffer(report.positions, dtype=POSITION)
        rows = np.empty(len(positions), dtype=self._known.dtype)
        is_due = np.zeros(len(positions), dtype=np.bool_)
        is_live, unknown = _move_on(self._known, self._is_live, positions, rows, is_due)
        if unknown:
            return None
        self._look_up(rows, np.flatnonzero(is_due), lengths)
        if report.requests:
            new = progress_rows(report.requests, lengths, tiers, report.age_s)
            self._told.update(zip(new["id"].tolist(), report.requests, strict=True))
            came_s = [reserved_s.get(uid, 0.0) for uid in new["id"].tolist()]
            new["joined_s"] = np.maximum(new["joined_s"], np.array(came_s) - (now_s - report.age_s))
            rows = stacked(rows, new)
            is_live = np.append(is_live, [seen.request_id in lengths.live for seen in report.requests])
        self._known, self._is_live = rows, is_live
        if len(self._told) > 2 * len(rows) + 16:
            self._told = {uid: self._told[uid] for uid in rows["id"].tolist()}
        rows = copied(rows)
        rows["arrival_s"] += now_s - report.age_s
        rows["joined_s"] += now_s - report.age_s
        rows["deadline_s"] += rows["arrival_s"]
        return rows

    def _look_up(self, rows: np.ndarray, due: np.ndarray, lengths: FleetLengths) -> None:
        """Write what is known now of the lengths of some of the rows."""
        if not len(due):
            return
        uids, *columns = (rows[name][due].tolist() for name in ("id", *SO_FAR))
        told = zip((self._told[uid] for uid in uids), *columns, strict=True)
        estimates = [lengths.further(*each) for each in told]
        rows["output_tokens"][due], rows["output_bound_tokens"][due] = np.array(estimates, dtype=np.int64).T


def progress_rows(requests: Sequence[Progress], lengths: FleetLengths, tiers: TierTable, age_s: float) -> np.ndarray:
    """Requests told in full as a planning table; ``arrival_s`` counts from when the replica's ``age_s`` was 0,
    ``deadline_s`` from there."""
    return np.array([_progress_row(seen, lengths, tiers, age_s) for seen in requests], dtype=REQUEST)


def _progress_row(seen: Progress, lengths: FleetLengths, tiers: TierTable, age_s: float) -> tuple[Any, ...]:
    """The fields of REQUEST in their order: filled in one by one they would cost more."""
    slo, tier = seen.slo, tiers.of_request(seen.slo)
    bounds = NO_BOUNDS if slo.best_effort else (slo.ttft_s, slo.tpot_s, slo.e2e_s)
    so_far = seen.prompt_tokens, seen.computed_tokens, seen.emitted_tokens
    sizes = *so_far, *lengths.at_progress(seen), seen.output_cap_tokens, 0
    kind = tier, slo.best_effort, seen.running, 0, tiers.value(tier)
    rest = 0, 0, 0.0, 0.0, age_s - seen.age_s, 0.0, 0
    return request_uid(seen.request_id), age_s - seen.age_s, *bounds, *sizes, *kind, *rest
