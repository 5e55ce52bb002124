"""What ingresses are answered. Pure."""

from controller.mirror.replica_model import VirtualReplica
from controller.pauses import RETRY_INTERVAL_S
from controller.placement import Pending
from protocol.messages import INF, AdmissionRequest, Decision, Verdict

NOT_HERE = Verdict.REFUSED, Verdict.ELSEWHERE  # this controller has nothing more to do with the request
UNDECIDED = "controller_error"  # the decision failed
NO_PLACE = "program_waits"  # for room for its conversation in the KV caches
PROMISED = "program_promised"  # a round that is placed because its program was promised


def admitted(p: Pending, replica: VirtualReplica, tier: str) -> Decision:
    """A place with a prediction; ``admission_off`` where nothing was checked, but for rounds of promised programs."""
    unchecked = PROMISED if p.reason == PROMISED else "admission_off"
    return Decision(
        p.request.request_id,
        Verdict.ADMITTED,
        replica.name,
        tier,
        "attainable" if p.is_checked else unchecked,
        p.first_s - float(p.row["arrival_s"]),
        p.tpot_s,
        hops=p.hops,
        output_tokens=int(p.row["output_tokens"]),
        output_bound_tokens=int(p.row["output_bound_tokens"]),
        value=float(p.row["value"]),
        ttft_s=p.request.slo.ttft_s,
        margin_s=p.margin_s,
        is_promoted=0 <= replica.state["tier"].item() < p.tier,
        chance=p.chance,
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
        output_bound_tokens=int(p.row["output_bound_tokens"]),
        value=float(p.row["value"]),
        ttft_s=p.request.slo.ttft_s,
    )


def unplaced(p: Pending, verdict: Verdict, reason: str, wait_s: float) -> Decision:
    """No place: refused, or to be asked about again; either after ``wait_s``. What is refused for good tells what an
    idle replica would do."""
    name, slo = p.request.request_id, p.request.slo
    is_hopeless = verdict == Verdict.REFUSED and not wait_s
    alone = (p.first_s - float(p.row["arrival_s"]), p.tpot_s) if is_hopeless else (INF, INF)
    return Decision(name, verdict, "", slo.tier, reason, *alone, p.hops, wait_s, ttft_s=slo.ttft_s)


def without_place(request: AdmissionRequest, wait_s: float) -> Decision:
    """Its program waits for a place; to be asked about again after ``wait_s``."""
    name, tier = request.request_id, request.slo.tier
    return Decision(name, Verdict.PENDING, "", tier, NO_PLACE, retry_after_s=wait_s, ttft_s=request.slo.ttft_s)


def unheard(request: AdmissionRequest) -> Decision:
    """Nothing was decided, because its ingress had given the question up; should it wait after all, it asks again."""
    name, tier = request.request_id, request.slo.tier
    return Decision(name, Verdict.PENDING, "", tier, "given_up", retry_after_s=RETRY_INTERVAL_S[0])


def undecided(request: AdmissionRequest) -> Decision:
    """Deciding failed: its ingress chooses a replica and keeps the objective (``serving.dispatch.deciding``)."""
    return Decision(request.request_id, Verdict.UNCHECKED, "", request.slo.tier, UNDECIDED)
