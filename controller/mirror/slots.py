"""The arrays that hold every replica's mirror: slots are handed out and taken back, rows grow by doubling."""

from collections.abc import Sequence

import numpy as np
from numba import njit

from planning.admission.search import ADMITTED
from profiles.kernels import token_s
from routing.fleet_state import (
    SHARED,
    FleetState,
    add_request,
    hold_request,
    make_fleet_state,
    recompute_load,
    remove_request,
    resized,
)
from routing.idle import at_best

PUNCTUAL, LAG_S = 64, 0.05  # replicas whose mirrors are moved on together at every question; of more, those so late
DOUBT_S = 1.5  # a report that comes so soon after a failure was seen may be older than the failure
# One record per slot tells whether its replica lives. All times are on the controller's clock.
LIVENESS = np.dtype(
    [
        ("is_used", "?"),
        ("draining", "?"),  # says that it takes nothing new
        ("is_stuck", "?"),  # its engine stands still
        ("is_slowed", "?"),  # its iterations took far longer than its profile says
        ("seen_s", "f8"),  # of its last report
        ("moved_s", "f8"),  # of the start of its iteration in flight, or of when it was last idle
        ("suspect_s", "f8"),  # of when an ingress last saw it fail
    ]
)


@njit(cache=True)
def are_live(told: np.ndarray, now_s: float, silent_s: float) -> np.ndarray:
    """``ReplicaSlots.are_live`` of LIVENESS[R]."""
    live = np.empty(len(told), dtype=np.bool_)
    for r in range(len(told)):
        is_heard = told[r]["is_used"] and now_s - told[r]["seen_s"] <= silent_s
        live[r] = is_heard and told[r]["moved_s"] - told[r]["suspect_s"] > DOUBT_S
    return live


@njit(cache=True)
def gone(told: np.ndarray, now_s: float, silent_s: float, forget_s: float) -> np.ndarray:
    """``ReplicaSlots.gone`` of LIVENESS[R] (i8[k])."""
    found, count = np.empty(len(told), dtype=np.int64), 0
    for r in range(len(told)):
        has_failed = told[r]["suspect_s"] > told[r]["seen_s"]
        most_s = min(2.0 * silent_s, forget_s) if has_failed else forget_s
        if told[r]["is_used"] and now_s - told[r]["seen_s"] > most_s:
            found[count] = r
            count += 1
    return found[:count]


@njit(cache=True)
def _without(told: np.ndarray, live: np.ndarray, takes_stuck: bool) -> np.ndarray:
    """Of the live slots (bool[R]) those that do not drain and, unless it ``takes_stuck``, do not stand still."""
    left = np.empty(len(told), dtype=np.bool_)
    for r in range(len(told)):
        left[r] = live[r] and not told[r]["draining"] and (takes_stuck or not told[r]["is_stuck"])
    return left


@njit(cache=True)
def usable(told: np.ndarray, closed: np.ndarray, now_s: float, silent_s: float, forget_s: float) -> np.ndarray:
    """``ReplicaSlots.usable`` of LIVENESS[R]; ``closed`` are slots (i8[k])."""
    live = are_live(told, now_s, silent_s)
    live[closed] = False
    moving = _without(told, live, False)
    if moving.any():
        return moving
    alive = _without(told, live, True)
    if alive.any():
        return alive
    known = are_live(told, now_s, forget_s)
    known[closed] = False
    return _without(told, known, True)


class ReplicaSlots:
    """Owner of ``FleetState``. Its arrays move when they grow: ask for them anew after every call."""

    def __init__(self, replicas: int = 4, rows: int = 64) -> None:
        self.fleet_state: FleetState = make_fleet_state(replicas, rows)
        self.liveness = np.zeros(replicas, dtype=LIVENESS)
        self.profile_coefs: dict[int, np.ndarray] = {}  # slot -> coefficients of its replica's profile as it is
        self._free, self._looked_s = list(range(replicas)), -np.inf  # when ``gone`` did

    def take(self) -> int:
        """A free slot, the lowest there is: closed, shared, empty."""
        known, rows = self.fleet_state.forecasts.shape
        if not self._free:
            self.fleet_state = resized(self.fleet_state, 2 * known, rows)
            self.liveness = np.append(self.liveness, np.zeros(known, dtype=LIVENESS))
            self._free = list(range(known, 2 * known))
        slot = self._free.pop(0)
        self.liveness[slot] = np.zeros((), dtype=LIVENESS)
        self.liveness["is_used"][slot], self.liveness["suspect_s"][slot] = True, -np.inf
        return slot

    def release(self, slot: int) -> None:
        """Close a slot and forget its rows."""
        self.fleet_state.replicas[slot] = np.zeros((), dtype=self.fleet_state.replicas.dtype)
        self.fleet_state.replicas["tier"][slot] = SHARED
        self.liveness["is_used"][slot] = False
        self._free = sorted([*self._free, slot])

    def are_live(self, now_s: float, silent_s: float) -> np.ndarray:
        """Which slots' replicas reported within ``silent_s`` and, since an ingress last saw them fail, that their
        engines go on (bool[R]).

        An iteration may take long; but where an ingress has given up, only one that began later says that the
        engine does not stand still, however punctual the reports are.
        """
        found: np.ndarray = are_live(self.liveness, now_s, silent_s)
        return found

    def usable(self, closed: Sequence[int], now_s: float, silent_s: float, forget_s: float) -> np.ndarray:
        """Which slots may take requests (bool[R]): those whose replicas are live and move, and are not ``closed``.

        Where all stand still, those as well; where none has reported lately, those that have within ``forget_s``.
        """
        found: np.ndarray = usable(self.liveness, np.array(closed, dtype=np.int64), now_s, silent_s, forget_s)
        return found

    def is_any_in_doubt(self, now_s: float, silent_s: float) -> bool:
        """Whether a replica that reported within ``silent_s`` and does not drain may have failed only for an ingress:
        nothing says yet that its engine goes on."""
        told = self.liveness
        heard = told["is_used"] & ~told["draining"] & (now_s - told["seen_s"] <= silent_s)
        return bool((heard & (told["moved_s"] - told["suspect_s"] <= DOUBT_S)).any())

    def gone(self, now_s: float, silent_s: float, forget_s: float) -> list[int]:
        """Slots whose replicas have not reported for longer than ``forget_s``; twice ``silent_s`` is enough where an
        ingress has seen the replica fail since its last report. Each report of a large fleet does not ask anew."""
        if 0.0 <= now_s - self._looked_s < self.lag_s:
            return []
        self._looked_s = now_s
        found: list[int] = gone(self.liveness, now_s, silent_s, forget_s).tolist()
        return found

    @property
    def lag_s(self) -> float:
        """How far mirrors may be behind when a question is answered; who is checked exactly is moved on before.

        Moving all of a large fleet on at every question costs more than the questions do, and a mirror's sums, by
        which replicas are only put in order, hardly change within a few iterations.
        """
        return LAG_S if len(self.liveness) - len(self._free) > PUNCTUAL else 0.0

    @property
    def is_any_open(self) -> bool:
        """Whether any replica takes requests."""
        return bool(self.fleet_state.replicas["is_open"].any())

    def may_recover(self, row: np.void, now_s: float) -> bool:
        """Whether an idle replica that was far slower than its profile says could attain a request if it were not."""
        slowed = np.flatnonzero(self.liveness["is_slowed"] & self.fleet_state.replicas["is_open"])
        if not len(slowed):
            return False
        coefs = self.fleet_state.pessimistic_coefs
        measured = coefs[slowed]
        coefs[slowed] = [self.profile_coefs[slot] for slot in slowed.tolist()]
        try:
            return bool(at_best(self.fleet_state, row, now_s)[0] == ADMITTED)
        finally:
            coefs[slowed] = measured

    def best_token_s(self) -> np.ndarray:
        """Seconds per prompt token (f8[R]), by its profile where a replica was far slower than that says."""
        found: np.ndarray = self.fleet_state.replicas["prompt_token_s"].copy()
        slowed = np.flatnonzero(self.liveness["is_slowed"] & self.fleet_state.replicas["is_open"])
        found[slowed] = [token_s(self.profile_coefs[slot]) for slot in slowed.tolist()]
        return found

    def rows(self, slot: int) -> np.ndarray:
        """The requests of a slot (REQUEST[count], a view)."""
        return self.fleet_state.tables[slot, : self.fleet_state.replicas["count"][slot]]

    def put(self, slot: int, table: np.ndarray) -> None:
        """Replace the requests of a slot; those that are held go last (``hold``)."""
        if len(table) and np.isinf(table["joined_s"]).any():
            table = table[np.argsort(np.isinf(table["joined_s"]), kind="stable")]
        self._make_room(len(table))
        self.fleet_state.tables[slot, : len(table)].view(np.uint8)[:] = np.ascontiguousarray(table).view(np.uint8)
        self.fleet_state.replicas["count"][slot] = len(table)
        recompute_load(self.fleet_state, slot)

    def add(self, slot: int, row: np.ndarray) -> None:
        """Add one request."""
        self._make_room(int(self.fleet_state.replicas["count"][slot]) + 1)
        add_request(self.fleet_state, slot, np.atleast_1d(row)[0])

    def hold(self, slot: int, uid: int) -> None:
        """Keep a request's place without its being at the engine (``routing.fleet_state.hold_request``)."""
        hold_request(self.fleet_state, slot, uid)

    def remove(self, slot: int, uid: int) -> bool:
        """Remove a request; whether it was there."""
        return bool(remove_request(self.fleet_state, slot, uid))

    def allocate(self, rows: int) -> None:
        """See to it that every slot has room for that many more requests, and one to try with."""
        self._make_room(int(self.fleet_state.replicas["count"].max()) + rows)

    def _make_room(self, rows: int) -> None:
        replicas, known = self.fleet_state.forecasts.shape
        if rows + 1 > known:
            self.fleet_state = resized(self.fleet_state, replicas, max(2 * known, rows + 1))
