"""Soft admission control: which new requests to promise their SLO, given everything already promised.

SLOs-Serve section 3.2.1. A set is attainable when a forecast of the replica's own batches, from the end of the
iteration in flight to every predicted end, leaves no token late and no KV cache full.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planning.admission.dp_inputs import OPEN, PROMISED, REFUSED
from planning.admission.search import choose
from planning.engine import EngineModel
from planning.forecast.rollout import FORECAST, TOLERANCE_S
from planning.tables import RequestTable, stacked


class AdmitReason(StrEnum):
    """Why a request was admitted or not."""

    ADMITTED = "admitted"
    TTFT_UNATTAINABLE = "ttft_unattainable"
    TPOT_UNATTAINABLE = "tpot_unattainable"
    DEADLINE_UNATTAINABLE = "deadline_unattainable"
    WOULD_BREAK_ADMITTED = "would_break_admitted"
    KV_FULL = "kv_full"
    DISPLACED = "displaced"  # a set worth more was chosen over it


REASONS = tuple(AdmitReason)  # by the codes of planning.admission.search


@dataclass(frozen=True)
class AdmissionOptions:
    """How a set is chosen."""

    displace: bool = False  # requests without a first token may lose their promise to a better set
    movable: np.ndarray | None = None  # bool, one entry per running request: only these may
    searches: bool = True  # every set of few requests, and the DP; else most value per work goes first


@dataclass(frozen=True)
class AdmissionPlan:
    """Which of the new requests are admitted and what to expect; arrays have one entry per new request."""

    accepted: np.ndarray  # bool
    begin_s: np.ndarray  # when its first iteration starts; inf when refused
    predicted_ttft_s: np.ndarray  # from arrival; inf when refused and not forecast
    predicted_tpot_s: np.ndarray
    reasons: tuple[AdmitReason, ...]
    displaced: np.ndarray  # bool, one entry per running request: lost its promise


def plan_admission(
    engine: EngineModel,
    running: RequestTable,
    new: RequestTable,
    start_s: float,
    options: AdmissionOptions = AdmissionOptions(),
) -> AdmissionPlan:
    """Choose which of ``new`` to admit beside ``running`` (both request tables) from ``start_s`` on.

    ``start_s`` is the end of the iteration in flight and ``running`` the state at that time, waiting requests included.
    What is promised stays promised, except that with ``options.displace`` requests without a first token may lose
    their place where that lets a set in that is worth more, or as much for less work (SLOs-Serve sections 3.2.1 and
    4.1; of equal sets the one of least work leaves most room to those who come next, as in Moore and Hodgson's rule).
    """
    first = len(running)
    table = stacked(running, new)
    fixed = np.ones(first, np.bool_)
    status, reasons, forecast = _choose(engine, table, fixed, start_s, options.searches)
    if options.displace and (status[first:] == REFUSED).any():
        if options.movable is not None:
            fixed = ~options.movable
        else:
            fixed = (running["emitted_tokens"] > 0) | (_prefill_tokens(running) <= 1) | running["best_effort"]
        other = _choose(engine, table, fixed, start_s, options.searches)
        if _is_better(table, other[0], status):
            status, reasons, forecast = other
    is_refused = status[first:] == REFUSED
    return AdmissionPlan(
        accepted=~is_refused,
        begin_s=np.where(is_refused, np.inf, forecast["begin_s"][first:]),
        predicted_ttft_s=np.where(is_refused, np.inf, forecast["first_s"][first:] - new["arrival_s"]),
        predicted_tpot_s=np.where(is_refused, np.inf, forecast["tpot_s"][first:]),
        reasons=tuple(REASONS[code] for code in reasons[first:]),
        displaced=status[:first] == REFUSED,
    )


def _choose(
    engine: EngineModel, table: RequestTable, fixed: np.ndarray, start_s: float, searches: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Statuses, reason codes and forecast of every row; ``fixed`` ones among the first stay, the others are open."""
    status = np.full(len(table), OPEN)
    status[: len(fixed)][fixed] = PROMISED
    forecast = np.zeros(len(table), dtype=FORECAST)
    return status, choose(engine, table, status, start_s, forecast, searches), forecast


def _is_better(table: RequestTable, status: np.ndarray, other: np.ndarray) -> bool:
    """Whether all that is kept by ``status`` is worth more than by ``other``, or as much for less prefill work."""
    kept, others = status != REFUSED, other != REFUSED
    gain = float(table["value"][kept].sum() - table["value"][others].sum())
    if abs(gain) > TOLERANCE_S:
        return gain > 0.0
    return bool(_prefill_tokens(table[kept]).sum() < _prefill_tokens(table[others]).sum())


def _prefill_tokens(table: RequestTable) -> np.ndarray:
    """Tokens of every request that are not computed yet."""
    todo: np.ndarray = table["prompt_tokens"] + table["emitted_tokens"] - table["computed_tokens"]
    return todo
