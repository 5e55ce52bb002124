"""What prefilling on one replica and decoding on another makes of a request: two, each with its own objective. Pure."""

from collections.abc import Iterable

import msgspec
import numpy as np

from controller.wire import INF, Admission, Slo
from planning.choice import ADMITTED
from planning.deadlines import PREFILL_TOKENS_PER_STEP
from routing.kernels import group_of, screen
from routing.mirrors import Mirrors


def prefill_slo(slo: Slo, prompt_tokens: int, output_tokens: int) -> Slo:
    """The objective of the prefill alone: its first token in time, and early enough for the rest to meet the deadline.

    Of an end-to-end deadline it gets its share of the work, as ``planning.deadlines.rate_due_s`` spreads it.
    """
    steps = (prompt_tokens - 1) / PREFILL_TOKENS_PER_STEP
    share = (1.0 + steps) / (max(output_tokens, 1) + steps)
    return msgspec.structs.replace(slo, ttft_s=min(slo.ttft_s, slo.e2e_s * share), tpot_s=INF, e2e_s=INF)


def prefill_part(ask: Admission, output_tokens: int) -> Admission:
    """The question about the prefill of a request whose whole output is predicted at ``output_tokens``."""
    return msgspec.structs.replace(ask, slo=prefill_slo(ask.slo, ask.prompt_tokens, output_tokens), max_tokens=1)


def can_decode(mirrors: Mirrors, slots: Iterable[int], row: np.ndarray, now_s: float) -> bool:
    """Whether some of these replicas has room for the request (REQUEST[]) once its prompt is computed.

    By the cached sums only: when the time comes, others will have left and come.
    """
    ready = row[None].copy()
    ready["emitted_tokens"], ready["computed_tokens"], ready["running"] = 1, row["prompt_tokens"], True
    ready["output_tokens"] = np.maximum(ready["output_tokens"], 2)
    for slot in slots:
        replica, limits = mirrors.replicas[slot], mirrors.limits[slot]
        holds = replica["held_tokens"] + row["prompt_tokens"] <= limits["kv_capacity_tokens"]
        is_suited = bool(row["best_effort"]) or group_of(int(replica["tier"]), int(row["tier"])) >= 0
        if holds and is_suited and screen(replica, mirrors.cautious[slot], limits, ready[0], now_s) == ADMITTED:
            return True
    return False
