"""What travels between ingress, controller and replicas: structs of numbers, ids and names; no text of a client's.

Times on the wire are durations or ages, never clock readings, so that machines need no common clock.
"""

import hashlib
from enum import StrEnum
from functools import lru_cache

import msgspec
import numpy as np

from protocol.prefixes import PrefixNews
from protocol.programs import RELEASED, Program, StageGiven

INF = float("inf")
LIVE_STRETCH = 8.0  # live engines' ``best_effort_stretch``; with a smaller one best effort is half as fast
BLOCK_TOKENS = 32  # KV tokens per block, where nothing else is configured; vLLM on a CPU wants multiples of 32
FINISHED = ("stop", "length", "repetition")  # how a whole output ends
PREFILLED = "prefilled"  # how a request ends on a replica that only prefills it
LOAD_TOKENS = 512  # of a prompt, that weigh as much as one more request in ``Outputs.load``


class Verdict(StrEnum):
    """What the controller decided for a request."""

    ADMITTED = "admitted"
    BEST_EFFORT = "best_effort"
    REFUSED = "refused"
    PENDING = "pending"  # not attainable now but perhaps soon: ask again after ``retry_after_s``
    ELSEWHERE = "elsewhere"  # no room in this shard: nothing is kept here, another may have some
    UNCHECKED = "unchecked"  # served with its objective, which nobody has promised: the controller was away


class Scope(StrEnum):
    """What an outcome is about: one HTTP request may have several sequences."""

    WHOLE = "whole"  # a request of one sequence: both of the following
    SEQUENCE = "sequence"  # frees its reservation and tells its length; counts in no attainment
    REQUEST = "request"  # counts in the attainment, with the figures of all its sequences; nothing else


class Slo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A resolved objective. ``inf`` means no bound; ``e2e_s`` and ``max_wait_s`` count from arrival."""

    ttft_s: float = INF
    tpot_s: float = INF
    e2e_s: float = INF
    tier: str = ""
    best_effort: bool = False
    max_wait_s: float = INF
    is_tier_open: bool = False  # nobody named ``tier``: the deadline may need a tighter one (``controller.binning``)
    ttft_slowdown: float = 0.0  # TTFT in multiples of an idle engine's, until ``Decision.ttft_s`` tells it; 0: none
    is_default: bool = False  # nobody stated any of it: in a program with a deadline, that of its stage alone counts


class Traits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the length of an output may depend on beside its prompt's length, its cap and its tenant."""

    app: str = ""  # application or task, as the client names it
    program: str = ""  # id of the program or session that it belongs to
    output_hint_tokens: int = 0  # that the client expects; 0: not said
    temperature: float = 1.0
    is_structured: bool = False  # bound to a grammar


class AdmissionRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request as the ingress asks the controller about it."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    slo: Slo
    age_s: float = 0.0
    emitted_tokens: int = 0  # > 0 when a stream resumes after its replica died
    exclude: tuple[str, ...] = ()  # replicas that just failed this request
    can_disaggregate: bool = True  # may be prefilled on one replica and decoded on another
    transferred_kv_tokens: int = 0  # of its KV cache, that another replica holds ready for the one that takes it
    prefix: tuple[int, ...] = ()  # marks of its prompt (``routing.prefix_index``), where affinity is on
    group: str = ""  # the same for sequences of one request that are admitted together or not at all
    tenant: str = ""  # digest of the API key, where the server checks keys
    prompt_digest: int = 0  # digest of its prompt, by which one that comes back after a refusal is known
    travelled_s: float = 0.0  # for which its KV cache has been on its way to the replica that decodes
    patience_s: float = INF  # for which the ingress waits for the answer to this question
    traits: Traits = Traits()
    program: Program | None = None  # that it is a part of
    adapter: str = ""  # LoRA adapter by name; empty: the model itself
    may_hop: bool = False  # another shard is asked next: ``ELSEWHERE`` instead of all that is less than a promise


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """The answer to questions that were asked together, in their order."""

    decisions: list["Decision"]
    load: float = 0.0  # of the replicas of who answers, in the mean; inf: it has none that takes requests


class Decision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is decided about one request. ``replica`` is empty when refused, pending or to be asked elsewhere."""

    request_id: str
    verdict: Verdict
    replica: str
    tier: str
    reason: str
    predicted_ttft_s: float = INF
    predicted_tpot_s: float = INF
    hops: int = 0
    retry_after_s: float = 0.0
    output_tokens: int = 0  # the controller's length prediction, for the engine's own planning
    prefill_only: bool = False  # this replica emits the first token; then ask again who decodes
    transfer_s: float = 0.0  # with ``prefill_only``: that its KV cache will travel before the second one
    output_bound_tokens: int = 0  # upper bound of the whole output; 0: not known
    stage: StageGiven | None = None  # of a part of a program: its deadline, in place of the one that was asked for
    value: float = 1.0  # what attaining it is worth, by its tier
    ttft_s: float = INF  # that it is decided by: as asked, or what a slowdown amounts to for its prompt
    margin_s: float = 0.0  # by how much earlier than asked its tier's requests are planned
    is_promoted: bool = False  # ``replica`` is one of a tighter tier (PolyServe's lazy promotion)
    chance: float = 1.0  # that its first token comes in time, as far as that depends on how iterations stray

    @property
    def keeps_objective(self) -> bool:
        """Whether the request is served in the class that it asked for."""
        return self.verdict in (Verdict.ADMITTED, Verdict.UNCHECKED)


class Progress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request as a replica reports it: enough to rebuild the controller's state from nothing."""

    request_id: str
    slo: Slo
    age_s: float
    prompt_tokens: int
    computed_tokens: int
    emitted_tokens: int
    output_tokens: int
    output_cap_tokens: int
    running: bool
    output_bound_tokens: int = 0


POSITION = np.dtype([("id", "<i8"), ("computed_tokens", "<i4"), ("emitted_tokens", "<i4"), ("running", "?")])


class Step(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One engine iteration: its batch composition (see ``profiles.kernels``) and how long it took."""

    batch_tokens: float
    kv_tokens: float
    pairs: float
    sequences: float
    spec_steps: float
    seconds: float


class EngineCounts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An engine's requests now, and what it has done since birth; vLLM's metrics of the same meaning show them."""

    running: int = 0  # requests in the running batch
    waiting: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # of requests that have emitted; cached ones included
    generation_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache, and found; requests come back after a preemption
    prefix_hits: int = 0  # count in neither


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What a replica pushes every 0.1-0.2 s."""

    replica: str  # Serve's unique id, by which requests are pinned
    incarnation: str  # changes when the engine restarts
    sequence: int
    profile: str
    kv_capacity_tokens: int
    kv_used_tokens: int
    max_running: int
    max_batch_tokens: int  # the planner's own, where that is lower
    iteration_age_s: float  # how long the iteration in flight has been running; 0 when idle
    requests: tuple[Progress, ...] = ()
    finished: tuple[tuple[str, int], ...] = ()  # (request id, output tokens) since the last report
    steps: tuple[Step, ...] = ()
    draining: bool = False
    pid: int = 0
    phase: str = ""  # "prefill" or "decode" where the replica is meant for one of them only
    block_tokens: int = 16  # this and the next three: what its plans keep to (``planning.limits``), at present
    max_iteration_s: float = 0.2
    best_effort_share: float = 0.0
    best_effort_stretch: float = LIVE_STRETCH
    planner_failures: int = 0  # steps since birth in which its planner failed and the engine's own order stood in
    counts: EngineCounts = EngineCounts()
    positions: bytes = b""  # POSITION[n]: of all its requests but ``requests``, which are told in full
    age_s: float = 0.0  # since its engine's incarnation began
    drafts: int = 0  # draft tokens that a decode may verify per step
    acceptance: float = 0.0  # chance that one is accepted, that promises may count on
    prefixes: PrefixNews | None = None  # where it knows by its engine's own word what the prefix cache holds
    aging_s: float = 20.0
    newcomer_share: float = 0.5
    steps_in_flight: int = 1  # iterations that its engine has formed, at most, when one of them runs
    lead_s: float = INF  # this and the next: when the second of them is formed (``planning.limits``)
    lead_share: float = 0.0


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a request ended, measured at the ingress; refused and broken ones included."""

    request_id: str
    tier_asked: str
    tier_served: str
    finish: str  # one of ``FINISHED``, "abort" (the client left), "refused", "error", ``RELEASED``
    met: bool
    ttft_s: float
    tpot_s: float
    e2e_s: float
    predicted_ttft_s: float
    predicted_tpot_s: float
    output_tokens: int
    verdict: Verdict
    scope: Scope = Scope.WHOLE
    output_cap_tokens: int = 0  # ``max_tokens`` of the request; 0: not said
    tenant: str = ""  # as in ``AdmissionRequest``
    was_promised: bool = False  # its objective, whatever the last decision says
    has_moved: bool = False  # a replica lost it on its way
    first_token_met: bool | None = None  # whether it was on time; None: not told while the request ran
    chance: float = 1.0  # as in ``Decision``

    @property
    def is_first_token(self) -> bool:
        """Whether this tells of a first token, ahead of the end: what else it says is of no account."""
        return self.finish == RELEASED and self.first_token_met is not None

    @property
    def is_promised(self) -> bool:
        """Whether an objective was promised: admitted with a prediction, which best effort and unchecked ones lack."""
        return self.was_promised or (self.verdict == Verdict.ADMITTED and self.predicted_ttft_s < INF)

    @property
    def tests_prediction(self) -> bool:
        """Whether what came can be compared with what was predicted: served as and where promised."""
        is_served = (self.finish in FINISHED or self.is_first_token) and self.verdict == Verdict.ADMITTED
        return is_served and self.predicted_ttft_s < INF and not self.has_moved


class Submission(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request on its way from the ingress to the decided replica."""

    request_id: str
    prompt_tokens: int  # of the original prompt, without tokens emitted elsewhere
    emitted_tokens: int  # output tokens emitted by earlier replicas; they follow the prompt in ``payload``
    max_tokens: int  # of the whole output, earlier tokens included
    slo: Slo
    age_s: float
    output_tokens: int  # predicted length of the whole output
    prompt_digest: int  # digest of the original prompt: the simulated engine derives its tokens from it
    payload: bytes = b""  # the engine's own request (vLLM: its msgpack form); empty for the simulated engine
    prefill_only: bool = False  # end with ``PREFILLED`` after the first token: another replica decodes
    transfer: bytes = b""  # what the prefilling replica said about the KV cache that this one may fetch
    output_bound_tokens: int = 0  # upper bound of the whole output; 0: not known
    tenant: str = ""  # as in ``AdmissionRequest``
    program: str = ""  # the task that it belongs to
    value: float = 1.0  # as in ``Decision``
    early_s: float = 0.0  # before a token is due that the engine is to finish it
    resume_key: str = ""  # by which a client may take up its stream elsewhere (``protocol.kept_streams``); empty: none
    sent_tokens: tuple[int, ...] = ()  # with it, the ``emitted_tokens``


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request, coalesced per engine iteration."""

    request_id: str
    token_ids: tuple[int, ...]
    finish: str = ""  # "", one of ``FINISHED``, "abort", "error", PREFILLED
    stop_reason: int | str | None = None
    extra: bytes = b""  # the engine's own output (msgpack) when it carries more than tokens, such as logprobs
    transfer: bytes = b""  # with PREFILLED: where the KV cache of the prompt is to be had
    late: bool = False  # the engine has put it behind the others: it could no longer be on time


class Outputs(msgspec.Struct, frozen=True, array_like=True):
    """One message on the stream from a replica to an ingress; also sent, empty, as a heartbeat."""

    steps: int  # engine iterations so far: a busy engine whose count stands still is hung
    busy: bool
    deltas: tuple[Delta, ...] = ()
    load: float = 0.0  # live requests of all ingresses, and one more for every ``LOAD_TOKENS`` to be prefilled
    draining: bool = False
    sent_s: float = 0.0  # on the replica's clock


class Rejection(msgspec.Struct, frozen=True, array_like=True):
    """A submission that a replica did not take, for a reason of its own."""

    request_id: str
    reason: str


@lru_cache(maxsize=1 << 16)
def request_uid(request_id: str) -> int:
    """The positive 63-bit id of a request inside planning tables."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest()) >> 1
