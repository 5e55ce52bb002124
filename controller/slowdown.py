"""TTFT as a slowdown over an idle engine (SLOs-Serve, table 3), made seconds for each prompt. Pure.

An idle engine: one of the fastest profile in the fleet, as its replicas' measured iterations correct it, with nothing
else to do. The whole prompt counts, also what a prefix cache may hold: what a client is promised must not depend on
what others asked before, and a cached prompt must not get a tighter deadline than a fresh one.
"""

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from controller.mirror.replica_model import VirtualReplica
from protocol.messages import INF, AdmissionRequest
from routing.idle import idle_prefill_s


def with_ttft(batch: Sequence[AdmissionRequest], replicas: Mapping[str, VirtualReplica]) -> Sequence[AdmissionRequest]:
    """The questions with a TTFT in seconds in place of a slowdown; unchanged where no replica is known.

    The sequences of one request have one TTFT: that of the longest prompt among them.
    """
    if not any(request.slo.ttft_slowdown for request in batch):
        return batch
    longest = dict[str, int]()
    for request in batch:
        longest[request.group] = max(longest.get(request.group, 0), request.prompt_tokens)
    return [_settled(r, longest[r.group] if r.group else r.prompt_tokens, replicas) for r in batch]


def _settled(request: AdmissionRequest, prompt_tokens: int, replicas: Mapping[str, VirtualReplica]) -> AdmissionRequest:
    slo = request.slo
    if not slo.ttft_slowdown or (idle_s := idle_ttft_s(prompt_tokens, replicas)) == INF:
        return request
    ttft_s = min(slo.ttft_slowdown * idle_s, slo.e2e_s)
    return msgspec.structs.replace(request, slo=msgspec.structs.replace(slo, ttft_s=ttft_s, ttft_slowdown=0.0))


def idle_ttft_s(prompt_tokens: int, replicas: Mapping[str, VirtualReplica]) -> float:
    """Seconds until the first token on an idle replica of the fastest profile; inf without replicas.

    The median of a profile's replicas counts, so that the most favourable error of many corrections decides nothing.
    """
    seconds = dict[str, list[float]]()
    for replica in replicas.values():
        alone_s = idle_prefill_s(replica.slots.fleet_state, replica.slot, prompt_tokens)
        seconds.setdefault(replica.profile.name, []).append(float(alone_s))
    return min((median(each) for each in seconds.values()), default=INF)
