"""What bounds one engine's iterations, as a record that kernels and arrays of replicas share."""

import math
from typing import Any, TypedDict, Unpack

import numpy as np
from numba.extending import register_jitable

LIMITS = np.dtype(
    [
        ("kv_capacity_tokens", "i8"),
        ("block_tokens", "i4"),  # KV is held in whole blocks
        ("max_running", "i4"),  # sequences that may hold KV at once
        ("max_batch_tokens", "i4"),
        ("max_iteration_s", "f8"),  # the executor's own cap: planning and execution must use the same
        # How far late and best-effort work may go beyond an empty iteration, as part of one: newcomers wait for it.
        ("best_effort_stretch", "f8"),
        ("newcomer_share", "f8"),  # of the tightest TTFT, that an iteration with such work may take
        ("best_effort_share", "f8"),  # of the time, kept for best effort that is older than aging_s
        ("aging_s", "f8"),  # late prompts and best effort that wait longer come first (``planning.batch.aging``)
        ("acceptance", "f8"),  # probability that a draft token is accepted
        # By how much of its prediction an iteration may take longer without making a token late: ``reach`` of
        # ``profiles.online``, 0 where predictions are exact.
        ("slack_margin", "f8"),
        ("kv_reserve", "i1"),  # position in ``KV_RESERVES``: room for outputs longer than expected
        ("kv_headroom", "f8"),  # part of the KV cache that admission leaves free for longer outputs than predicted
        ("fairness", "f8"),  # weight of fairness between tenants in a priority (Tempo section 4.3)
        ("group_cutoff", "f8"),  # least priority of a candidate as part of the last one chosen by it (CALM's p)
        ("group_size", "i4"),  # sequences of CALM's batch (its B), at most; 0: ``max_running``
        ("drafts", "i4"),  # draft tokens per decode, at most, that promises may count on; 0: what each row says
        ("steps_in_flight", "i4"),  # iterations that are formed, at most, when one of them runs
        # The next one is formed ``lead_s``, and this part of its time, before the one that runs is likely to end
        # (``planning.lead``); inf: as soon as that begins.
        ("lead_s", "f8"),
        ("lead_share", "f8"),
    ]
)
# Nothing; the root of the summed squares of (bound - mean), as independent lengths add up; the sum of them.
KV_RESERVES = ("mean", "pooled", "bound")
NO_RESERVE, POOLED_RESERVE, FULL_RESERVE = range(len(KV_RESERVES))


def newcomer_share(steps_in_flight: int) -> float:
    """The part of a TTFT that an iteration may take so that those in flight and the newcomer's own fit into it."""
    return 1.0 / (1 + steps_in_flight)


@register_jitable
def most_sequences(limits: Any) -> Any:
    """Sequences that may hold KV at once, of one ``LIMITS`` record."""
    return min(limits["max_running"], limits["group_size"]) if limits["group_size"] > 0 else limits["max_running"]


@register_jitable
def usable_kv_tokens(limits: Any) -> Any:
    """KV tokens that admission may promise (of one ``LIMITS`` record, or of an array of them)."""
    return limits["kv_capacity_tokens"] * (1.0 - limits["kv_headroom"])


class LimitOptions(TypedDict, total=False):
    """The fields of ``LIMITS`` that have a default."""

    block_tokens: int
    max_running: int
    max_batch_tokens: int
    max_iteration_s: float
    best_effort_stretch: float
    newcomer_share: float
    best_effort_share: float
    aging_s: float
    acceptance: float
    slack_margin: float
    kv_reserve: int
    kv_headroom: float
    fairness: float
    group_cutoff: float
    group_size: int
    drafts: int
    steps_in_flight: int
    lead_s: float
    lead_share: float


DEFAULTS = LimitOptions(
    block_tokens=16,
    max_running=256,
    max_batch_tokens=8192,
    max_iteration_s=0.2,
    best_effort_stretch=0.5,
    newcomer_share=newcomer_share(1),
    best_effort_share=0.0,
    aging_s=20.0,
    acceptance=0.0,
    slack_margin=0.0,
    kv_reserve=NO_RESERVE,
    kv_headroom=0.0,
    fairness=0.0,
    group_cutoff=1.0,
    group_size=0,
    drafts=0,
    steps_in_flight=1,
    lead_s=math.inf,
    lead_share=0.0,
)
SHARES = ("best_effort_share", "acceptance", "kv_headroom")


def make_limits(kv_capacity_tokens: int, **options: Unpack[LimitOptions]) -> np.void:
    """One ``LIMITS`` record; raises ``ValueError`` naming the field that is unknown or makes no sense."""
    record = np.zeros(1, dtype=LIMITS)
    given: dict[str, float] = {"kv_capacity_tokens": kv_capacity_tokens, **DEFAULTS, **options}  # type: ignore[dict-item]
    for name, value in given.items():
        if name not in (LIMITS.names or ()):
            raise ValueError(f"{name} is no limit of an engine")
        _check(name, value)
        record[name] = value
    limits: np.void = record[0]
    return limits


def _check(name: str, value: float) -> None:
    if name in SHARES:
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must lie in [0, 1), not {value}")
    elif name == "kv_reserve":
        if value not in range(len(KV_RESERVES)):
            raise ValueError(f"kv_reserve must be a position in {KV_RESERVES}, not {value}")
    elif name == "fairness":
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"fairness must lie in [0, 1], not {value}")
    elif name in ("group_cutoff", "newcomer_share"):
        if not 0.0 < value <= 1.0:
            raise ValueError(f"{name} must lie in (0, 1], not {value}")
    elif name in ("slack_margin", "drafts", "group_size", "lead_share"):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, not {value}")
    elif not value > 0 or (math.isinf(value) and name != "lead_s"):
        raise ValueError(f"{name} must be positive and finite, not {value}")
