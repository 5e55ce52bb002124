"""What bounds one engine's iterations, as a record that kernels and arrays of replicas share."""

import math

import numpy as np

LIMITS = np.dtype(
    [
        ("kv_capacity_tokens", "i8"),
        ("block_tokens", "i4"),  # KV is held in whole blocks
        ("max_running", "i4"),  # sequences that may hold KV at once
        ("max_batch_tokens", "i4"),
        ("max_iteration_s", "f8"),  # the executor's own cap: planning and execution must use the same
        (
            "best_effort_stretch",
            "f8",
        ),  # of an empty iteration: how far late and best-effort work may go beyond one (newcomers wait)
        ("best_effort_share", "f8"),  # part of every iteration kept for best effort, against starvation
        ("acceptance", "f8"),  # probability that a draft token is accepted
        (
            "slack_margin",
            "f8",
        ),  # of its prediction: by how much an iteration may take longer without making a token late
        ("kv_headroom", "f8"),  # part of the KV cache that admission leaves free for longer outputs than predicted
    ]
)


SLACK_MARGIN_PER_ERROR = (
    16.0  # slack margin per mean relative error of the predictions, in engines and in the controller's models of them
)
MAX_SLACK_MARGIN = 5.0


def slack_margin_for(error: float) -> float:
    """The slack margin of an engine whose iterations miss their predictions by ``error`` (mean absolute, relative).

    Exact predictions need none. One iteration in a hundred takes about ``1 + 5 * error`` times its prediction; most of
    what is on top of that covers several such in a row, since one late token misses the whole request.
    """
    return min(MAX_SLACK_MARGIN, SLACK_MARGIN_PER_ERROR * error)


def make_limits(
    kv_capacity_tokens: int,
    block_tokens: int = 16,
    max_running: int = 256,
    max_batch_tokens: int = 8192,
    max_iteration_s: float = 0.2,
    best_effort_stretch: float = 0.5,
    best_effort_share: float = 0.0,
    acceptance: float = 0.0,
    kv_headroom: float = 0.0,
    slack_margin: float = 0.0,
) -> np.void:
    """One ``LIMITS`` record; raises ``ValueError`` naming the field that makes no sense."""
    positive = {
        "kv_capacity_tokens": kv_capacity_tokens,
        "block_tokens": block_tokens,
        "max_running": max_running,
        "max_batch_tokens": max_batch_tokens,
        "max_iteration_s": max_iteration_s,
        "best_effort_stretch": best_effort_stretch,
    }
    for name, value in positive.items():
        if not value > 0 or math.isinf(value):
            raise ValueError(f"{name} must be positive and finite, not {value}")
    shares = {"best_effort_share": best_effort_share, "acceptance": acceptance, "kv_headroom": kv_headroom}
    for name, share in shares.items():
        if not 0.0 <= share < 1.0:
            raise ValueError(f"{name} must lie in [0, 1), not {share}")
    if not 0.0 <= slack_margin < math.inf:
        raise ValueError(f"slack_margin must be finite and not negative, not {slack_margin}")
    record = np.zeros(1, dtype=LIMITS)
    record[0] = (*positive.values(), best_effort_share, acceptance, slack_margin, kv_headroom)
    limits: np.void = record[0]
    return limits
