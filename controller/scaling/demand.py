"""What is asked of each tier, as rates over a window, and how many replicas that takes by the performance model."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from controller.scaling.tiers import Tier, TierTable
from planning.forecast.lockstep import accepted_tokens
from profiles.kernels import LINES, attention_s, draft_s, iteration_s, kv_read_s, overhead_s, roofline

YOUNG_S = 5.0  # rates of a shorter past are taken over so long
BISECTIONS = 40
UNBOUND_S, LEAST_S = 10.0, 0.1  # for a queue whose tier bounds no TTFT, and for any
LEAVE_PER_ARRIVAL = 2  # arrivals at most that are taken out of the window with each that comes


class Load(NamedTuple):
    """Work asked per second, of one tier."""

    requests_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    moved_tokens_per_s: float = 0.0  # of prompts that come with their KV caches

    @property
    def context_tokens(self) -> float:
        """KV tokens that a decode step reads in the mean: the prompt and half of the output."""
        if self.requests_per_s <= 0.0:
            return 0.0
        prompts_per_s = self.prefill_tokens_per_s + self.moved_tokens_per_s
        return (prompts_per_s + 0.5 * self.decode_tokens_per_s) / self.requests_per_s


@dataclass
class Demand:
    """Arrivals per tier over the last ``look_back_period_s``; a request that asks again is counted once.

    One that asks for longer than that counts once in each period: its output, which is no part of the queue of prompts,
    is still to be served.
    """

    look_back_period_s: float = 30.0
    _since_s: float | None = None
    _arrivals: deque[tuple[float, int, str, int, int]] = field(default_factory=deque)
    _counted: set[int] = field(default_factory=set)
    _sums: dict[str, list[int]] = field(default_factory=dict)  # per tier: requests, prompt and output tokens

    def note(self, uid: int, tier: str, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        """A request of ``tier`` arrived, with the length that is predicted for its output."""
        if uid in self._counted:
            return
        self._since_s = now_s if self._since_s is None else self._since_s
        self._counted.add(uid)
        self._arrivals.append((now_s, uid, tier, prompt_tokens, output_tokens))
        self._add(tier, 1, prompt_tokens, output_tokens)
        self._expire(now_s, LEAVE_PER_ARRIVAL)

    def loads(self, now_s: float) -> dict[str, Load]:
        """Rates of every tier that anything was asked of."""
        self._expire(now_s, len(self._arrivals))
        past_s = min(
            self.look_back_period_s, max(YOUNG_S, now_s - (self._since_s if self._since_s is not None else now_s))
        )
        return {tier: Load(*(each / past_s for each in sums)) for tier, sums in self._sums.items() if sums[0] > 0}

    def look_back(self, period_s: float, now_s: float) -> None:
        """Take rates over another period; the part of a longer one that is forgotten does not count as quiet."""
        if self._since_s is not None:
            self._since_s = max(self._since_s, now_s - self.look_back_period_s)
        self.look_back_period_s = period_s

    def _add(self, tier: str, *sizes: int) -> None:
        sums = self._sums.setdefault(tier, [0, 0, 0])
        for i, size in enumerate(sizes):
            sums[i] += size

    def _expire(self, now_s: float, most: int) -> None:
        """Take out arrivals older than the window, some at a time."""
        while most and self._arrivals and self._arrivals[0][0] < now_s - self.look_back_period_s:
            _, uid, tier, prompt_tokens, output_tokens = self._arrivals.popleft()
            self._counted.discard(uid)
            self._add(tier, -1, -prompt_tokens, -output_tokens)
            most -= 1


class Hardware(NamedTuple):
    """One replica of the kind that is added."""

    coefficients: np.ndarray  # of the iteration-time model
    kv_capacity_tokens: int
    max_iteration_s: float
    drafts: int = 0  # draft tokens per decode step, at most
    acceptance: float = 0.0  # of one, that promises may count on

    def replicas_for(self, load: Load, pace_s: float, queue_tokens_per_s: float = 0.0) -> float:
        """Replicas, as a fraction, that this load keeps busy all the time in iterations of ``pace_s`` or less.

        Longer iterations do more work but keep requests, and so their KV, longer: where KV is short the pace is the
        one at which time and KV run out together. inf where a replica can make no iteration in ``pace_s`` at all. With
        speculation all decodes draft as deep as takes fewest replicas.
        """
        depths = range(self.drafts + 1 if self.acceptance else 1)
        return min(self._replicas_at(depth, load, pace_s, queue_tokens_per_s) for depth in depths)

    def _replicas_at(self, depth: int, load: Load, pace_s: float, queue_tokens_per_s: float) -> float:
        gain = accepted_tokens(depth, self.acceptance)
        slow_s, fast_s = min(pace_s * gain, self.max_iteration_s), 0.0
        if self._busy(depth, load, slow_s, queue_tokens_per_s) >= self._held(load, slow_s / gain):
            return self._busy(depth, load, slow_s, queue_tokens_per_s)
        for _ in range(BISECTIONS):
            middle_s = 0.5 * (slow_s + fast_s)
            if self._busy(depth, load, middle_s, queue_tokens_per_s) < self._held(load, middle_s / gain):
                slow_s = middle_s
            else:
                fast_s = middle_s
        return self._held(load, slow_s / gain)

    def prompt_s(self, prompt_tokens: float) -> float:
        """Seconds that a prompt takes alone, in one iteration."""
        return float(iteration_s(self.coefficients, prompt_tokens, 0.0, 0.5 * prompt_tokens**2, 1.0, 0.0))

    def _busy(self, depth: int, load: Load, step_s: float, queue_tokens_per_s: float) -> float:
        """Share of one replica's time with ``depth`` drafts per decode step: work flows like a fluid.

        Of every second, it spends ``K * B + b / step`` on the roofline (the slower of its two lines), and per decode
        step the KV reads and overhead of its sequence: linear in the load, so the number follows in closed form.
        """
        coef, steps_per_s = self.coefficients, load.decode_tokens_per_s / accepted_tokens(depth, self.acceptance)
        tokens_per_s = load.prefill_tokens_per_s + (1 + depth) * steps_per_s
        prompt_tokens = load.prefill_tokens_per_s / load.requests_per_s if load.requests_per_s else 0.0
        rest = steps_per_s * (overhead_s(coef, 1.0) + kv_read_s(coef, load.context_tokens))
        rest += attention_s(coef, load.prefill_tokens_per_s) * 0.5 * prompt_tokens
        busy = 0.0
        for slope, base in (roofline(coef, line) for line in range(LINES)):
            free = 1.0 - (base + draft_s(coef, depth)) / step_s if step_s > 0.0 else 0.0
            work = slope * (tokens_per_s + queue_tokens_per_s) + rest
            busy = max(busy, work / free if free > 0.0 else math.inf if work > 0.0 else 0.0)
        return float(busy)

    def _held(self, load: Load, token_s: float) -> float:
        """Share of one replica's KV that is held by requests which emit a token every ``token_s`` (Little's law)."""
        return load.decode_tokens_per_s * token_s * load.context_tokens / self.kv_capacity_tokens


def pace_of(tier: Tier, load: Load) -> float:
    """Seconds per token that a tier's requests allow; a deadline is spread over the output. Best effort: no bound."""
    output_tokens = load.decode_tokens_per_s / load.requests_per_s if load.requests_per_s else 1.0
    return min(tier.tpot_s, tier.e2e_s / max(1.0, output_tokens))


def attainable_pace(tier: Tier, load: Load, hardware: Hardware) -> float:
    """``pace_of`` what decodes; no bound where no number of replicas could keep it, as of best effort."""
    pace_s = pace_of(tier, load)
    return pace_s if hardware.replicas_for(after_prefill(load), pace_s) < math.inf else math.inf


def queue_s(tier: Tier, load: Load, hardware: Hardware) -> float:
    """Time in which a tier's prompts in queue are to be computed: its TTFT, with a slowdown that of its mean prompt."""
    ttft_s = tier.ttft_s
    if tier.ttft_slowdown and load.requests_per_s:
        ttft_s = tier.ttft_slowdown * hardware.prompt_s(load.prefill_tokens_per_s / load.requests_per_s)
    return max(ttft_s if ttft_s < math.inf else UNBOUND_S, LEAST_S)


class Need(NamedTuple):
    """What a tier's demand takes."""

    replicas: int  # whole ones, beyond what tighter tiers leave
    busy: float  # as a fraction, of a fleet of its own


def plan_needs(
    table: TierTable,
    loads: Mapping[str, Load],
    waiting_tokens: Mapping[str, float],
    hardware: Hardware,
    target_utilization: float,
    unattainable: str = "best_effort",
) -> list[Need]:
    """Replicas per tier so that each is busy for ``target_utilization`` of the time, tightest tier first.

    What is left of a tier's last replica serves the next looser tiers (lazy promotion), as slowly as its own pace
    makes it. ``waiting_tokens`` are prompt tokens in queue: work that is due within the tier's TTFT. What no number of
    replicas could serve at its pace is best effort, unless its tier, or the fleet by ``unattainable``, refuses it.
    """
    needs, spare, spare_pace_s = [], 0.0, math.inf
    for i, tier in enumerate(table.tiers):
        load = loads.get(tier.name, Load())
        pace_s = pace_of(tier, load)
        queue = waiting_tokens.get(tier.name, 0.0) / queue_s(tier, load, hardware)
        share = 1.0 if tier.best_effort else target_utilization
        busy = hardware.replicas_for(load, pace_s, queue) / share
        if busy == math.inf and not table.refuses(i, unattainable):
            pace_s, share, queue = math.inf, 1.0, waiting_tokens.get(tier.name, 0.0) / UNBOUND_S
            busy = hardware.replicas_for(load, pace_s, queue)
        if not 0.0 < busy < math.inf:
            needs.append(Need(0, 0.0))
            continue
        promoted = hardware.replicas_for(load, min(pace_s, spare_pace_s), queue) / share
        used = min(spare, promoted) if promoted < math.inf else 0.0
        own = busy * (1.0 - used / promoted)
        replicas = math.ceil(own - 1e-9)
        spare += replicas - own - used
        spare_pace_s = min(spare_pace_s, pace_s)
        needs.append(Need(replicas, busy))
    return needs


def after_prefill(load: Load) -> Load:
    """The load of those that decode only."""
    return load._replace(prefill_tokens_per_s=0.0, moved_tokens_per_s=load.prefill_tokens_per_s)


def with_backlog(load: Load, waiting_tokens: float, pace_s: float) -> Load:
    """The load as if requests with so many prompt tokens, which wait to decode, ran at once at this pace as well."""
    if not waiting_tokens or not load.prefill_tokens_per_s or not load.decode_tokens_per_s or pace_s == math.inf:
        return load
    sequences = waiting_tokens * load.requests_per_s / load.prefill_tokens_per_s
    factor = 1.0 + sequences / (pace_s * load.decode_tokens_per_s)
    return Load(*(factor * each for each in load))


def prefill_replicas(
    table: TierTable,
    loads: Mapping[str, Load],
    waiting_tokens: Mapping[str, float],
    hardware: Hardware,
    target_utilization: float,
    unattainable: str = "best_effort",
) -> float:
    """Replicas, as a fraction, that compute the prompts of all tiers and are busy for ``target_utilization`` of the
    time, in iterations that a TTFT has room for. ``waiting_tokens`` and ``unattainable`` as of ``plan_needs``."""
    replicas = 0.0
    for i, tier in enumerate(table.tiers):
        load = loads.get(tier.name, Load())
        due_s = queue_s(tier, load, hardware)
        prompts = load._replace(decode_tokens_per_s=0.0)
        busy = hardware.replicas_for(prompts, due_s, waiting_tokens.get(tier.name, 0.0) / due_s)
        busy /= 1.0 if tier.best_effort else target_utilization
        if busy == math.inf and not table.refuses(i, unattainable):
            busy = hardware.replicas_for(prompts, math.inf, waiting_tokens.get(tier.name, 0.0) / UNBOUND_S)
        replicas += busy if busy < math.inf else 0.0
    return replicas


def share_budget(lows: list[int], needed: list[int], budget: int) -> list[int]:
    """Divide ``budget`` replicas: minimums first, tightest first; then one at a time to the least satisfied want.

    Ties go to the tighter tier. Nobody gets more than it wants or its minimum.
    """
    shares = [0] * len(lows)
    for i, low in enumerate(lows):
        shares[i] = min(low, budget - sum(shares))
    while sum(shares) < budget:
        short = [i for i in range(len(needed)) if shares[i] < needed[i]]
        if not short:
            break
        shares[min(short, key=lambda i: (shares[i] / needed[i], i))] += 1
    return shares
