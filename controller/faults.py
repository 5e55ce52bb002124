"""A fault in what is decided or heard about one request takes nothing of another's with it. Pure.

Requests that arrived together are decided together. Where that raises, each is decided by itself, after everything
that the failed attempt had put into the mirrors is gone. What still raises is left to its ingress, which chooses a
replica as it does without the controller and keeps the objective.
"""

import logging
from collections.abc import Sequence

from controller.decisions import undecided
from controller.fleet import Fleet
from controller.held import Askers
from controller.patience import parts
from protocol.messages import AdmissionRequest, Decision, Outcome, request_uid

logger = logging.getLogger("polyslo.controller")


def admit_each(fleet: Fleet, batch: Sequence[AdmissionRequest], now_s: float, by: Askers) -> list[Decision]:
    """``Fleet.admit``, which raises for nobody; sequences of one request share its fate."""
    try:
        return fleet.admit(batch, now_s, by)
    except Exception:
        _take_back(fleet, batch)
        single = parts(batch, 1)
        if len(single) == 1:
            logger.exception("no decision about %s: its ingress chooses a replica", batch[0].request_id)
            return [undecided(request) for request in batch]
        logger.exception("no decision about %d requests together: each is decided by itself", len(batch))
    return [decision for alone in single for decision in admit_each(fleet, alone, now_s, by)]


def note_each(fleet: Fleet, outcomes: Sequence[Outcome], now_s: float) -> None:
    """``Fleet.on_outcome`` of each, which raises for nobody: of one that fails less is learnt."""
    for outcome in outcomes:
        try:
            fleet.on_outcome(outcome, now_s)
        except Exception:
            logger.exception("not all was learnt from how %s ended", outcome.request_id)


def _take_back(fleet: Fleet, batch: Sequence[AdmissionRequest]) -> None:
    """These requests have no place, and no row is left that nobody has noted."""
    for request in batch:
        uid = request_uid(request.request_id)
        fleet.unplaced.leave(uid)
        fleet.held.free(uid)
    fleet.places.release_unnoted()
