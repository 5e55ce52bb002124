"""What ingresses are answered. Pure."""

from controller.placement import Pending
from protocol.messages import Decision, Verdict


def admitted(p: Pending, replica: str, tier: str) -> Decision:
    """A place with a prediction; ``admission_off`` where nothing was checked."""
    return Decision(
        p.request.request_id,
        Verdict.ADMITTED,
        replica,
        tier,
        "attainable" if p.is_checked else "admission_off",
        p.first_s - float(p.row["arrival_s"]),
        p.tpot_s,
        hops=p.hops,
        output_tokens=int(p.row["output_tokens"]),
    )


def best_effort(p: Pending, replica: str, instead_tier: str | None) -> Decision:
    """A place without a promise: asked for, or in ``instead_tier`` because nothing could be promised."""
    return Decision(
        p.request.request_id,
        Verdict.ADMITTED if instead_tier is None else Verdict.BEST_EFFORT,
        replica,
        p.request.slo.tier if instead_tier is None else instead_tier,
        "best_effort" if instead_tier is None else p.reason,
        hops=p.hops,
        output_tokens=int(p.row["output_tokens"]),
    )


def unplaced(p: Pending, verdict: Verdict, reason: str, wait_s: float) -> Decision:
    """No place: refused, or to be asked about again; either after ``wait_s``."""
    name, tier = p.request.request_id, p.request.slo.tier
    return Decision(name, verdict, "", tier, reason, hops=p.hops, retry_after_s=wait_s)
