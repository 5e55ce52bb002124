"""The planner of one engine: planning's batch policy, the profile it plans with and what was learnt about it.

Shared by both engine kinds, so that they decide alike. No ray, vllm or clock here.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from planning.batch.classes import find_late
from planning.batch.composition import DRAFT_TOKENS
from planning.batch.group_size import group_size
from planning.batch.memory import cutoff, new_memory, recall, record
from planning.batch.registry import batch_policy
from planning.batch.speculation import fastest_depth, plan_drafts
from planning.deadlines import begin_lines
from planning.engine import EngineModel
from planning.limits import make_limits, newcomer_share
from planning.tables import request_table
from profiles.cache_filling import await_filled
from profiles.draft_cost import DraftCost
from profiles.kernels import K_SPEC, iteration_s
from profiles.online import corrected, new_correction, observe
from profiles.online_state import ERROR
from profiles.reach import reach
from profiles.store import load_profile
from protocol.messages import LIVE_STRETCH
from replicas.engine import PlanLimits
from replicas.stream_acceptance import StreamAcceptance

VLLM_DEFAULT = "vllm"  # inside vLLM: its own scheduler, untouched
OPTIONS = (
    "max_iteration_s",
    "best_effort_stretch",
    "newcomer_share",
    "best_effort_share",
    "aging_s",
    "token_budget",
    "fairness",
    "group_cutoff",
    "group_size",
    "lead_s",
)
ACCEPTANCE_PRIOR = 0.5  # chance that a draft token is accepted, as long as nobody has seen any
ACCEPTANCE_WEIGHT = 0.005  # of one more draft token in the running rate
# Each decode drafts so many tokens, wanted or not, once in so many steps, so that acceptance is known and stays so.
EXPLORED, EXPLORE_EVERY, EXPLORE_UNKNOWN_EVERY = 2, 16, 4
SPEED_STEPS = 50  # iterations by which the speed of an engine is learnt whose profile is a guess
PRIOR_WEIGHT = 0.0005  # of the prior, per iteration without drafts: what was learnt fades when it is not tested


def planner_limits(policy: str, options: dict[str, float], **bounds: int) -> np.void:
    """The limits of a policy with these options; raises ``ValueError`` that begins with the option that is unknown or
    makes no sense."""
    known = batch_policy(policy)
    chosen: dict[str, Any] = {"best_effort_stretch": LIVE_STRETCH, **known.options, **bounds}
    for name, value in options.items():
        if name not in OPTIONS:
            raise ValueError(f"{name}: unknown option, known: {', '.join(OPTIONS)}")
        if name == "group_size" and name not in known.adapts:
            raise ValueError(f"{name}: only calm knows it, not {policy}")
        if name == "token_budget":
            if not 1.0 <= value < math.inf:
                raise ValueError(f"{name}: must be at least 1 and finite, not {value}")
            chosen["max_batch_tokens"] = min(int(value), bounds.get("max_batch_tokens", int(value)))
        else:
            chosen[name] = value
    return make_limits(**chosen)


def options_of(options: Mapping[str, float], is_asynchronous: bool, forms_late: bool = False) -> dict[str, float]:
    """The options of a policy inside an engine of vLLM, beside what its way of scheduling asks for."""
    waits_for_two = is_asynchronous and not forms_late
    return {**({"newcomer_share": newcomer_share(2)} if waits_for_two else {}), **options}


def reported_limits(policy: str, options: dict[str, float], *, block_tokens: int, max_batch_tokens: int) -> PlanLimits:
    """What the controller is to plan by; options of policies that make no plans say nothing about those."""
    chosen = options if batch_policy(policy).plans_ahead else {"best_effort_share": 0.0}
    own = dict(block_tokens=block_tokens, max_batch_tokens=max_batch_tokens)
    limits = planner_limits(policy, chosen, kv_capacity_tokens=1, **own)
    return PlanLimits(*(limits[name].item() for name in PlanLimits.__struct_fields__))


class StepPlanner:
    """Plans iterations and learns from their durations. ``learn=False`` trusts the profile as it is."""

    def __init__(
        self,
        coefficients: np.ndarray,
        *,
        kv_capacity_tokens: int,
        block_tokens: int,
        max_running: int,
        max_batch_tokens: int,
        learn: bool = True,
    ) -> None:
        self._profile = np.array(coefficients, dtype=np.float64)
        self._speeds: list[float] = []  # seconds of iterations over those of the guess
        self.is_ready = True  # false while the profile is a guess that has not been scaled yet
        self._correction = new_correction(self._profile)
        self._learn = learn
        self._bounds: dict[str, Any] = dict(
            kv_capacity_tokens=kv_capacity_tokens,
            block_tokens=block_tokens,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
        )
        self._acceptance, self._drafting_steps = ACCEPTANCE_PRIOR, 0
        self._ran = np.zeros(0, dtype=np.int64)  # requests of the last batch formed
        self._draft_cost, self._streams = DraftCost(), StreamAcceptance()
        self._memory = new_memory()
        self.coefficients, self._adapts = self._profile, set[str]()
        self.configure("slo", {})

    def expect(self, profile_name: str) -> None:
        """Begin with the margin that the profile's spread asks for, before anything was measured."""
        self._correction = new_correction(self._profile, load_profile(profile_name).spread)
        self.limits["slack_margin"] = reach(self._correction)

    def configure(self, policy: str, options: dict[str, float]) -> None:
        """Choose the policy by name; raises ``ValueError`` for an unknown policy or option."""
        limits, known = planner_limits(policy, options, **self._bounds), getattr(self, "limits", None)
        if known is not None and "lead_s" not in options and "lead_s" in self._adapts:
            limits["lead_s"], limits["lead_share"] = known["lead_s"], known["lead_share"]
        limits["acceptance"], limits["slack_margin"] = min(self._acceptance, 0.99), reach(self._correction)
        self.policy, self.limits = batch_policy(policy), limits
        self._adapts = {*self.policy.adapts, "lead_s"} - set(options)

    def warm_up(self) -> None:
        """Compile, so that no request waits for it; where another process does so, wait for that one."""
        await_filled()
        table = request_table(2)
        table["id"], table["running"], table["computed_tokens"] = (1, 2), (True, False), (1, 0)
        table["emitted_tokens"], table["output_tokens"], table["output_cap_tokens"] = 1, 4, 8
        begin_lines(table, 0.0)
        self.plan_drafts(table, 0.0, 1)
        self.plan(table, 0.0)
        self.late(table, 0.0)
        state = observe(new_correction(self._profile), self._profile, np.array([1.0, 1.0, 0.0, 1.0, 0.0]), 0.01)
        corrected(self._profile, state)

    def plan(self, table: np.ndarray, now_s: float) -> tuple[np.ndarray, float, np.ndarray]:
        """Tokens per row (``PREEMPT``: gives up its KV), predicted seconds and composition of the next iteration.

        A policy that remembers takes the batch for run: once per iteration.
        """
        tokens, engine = np.empty(len(table), dtype=np.int32), EngineModel(self.coefficients, self.limits)
        if self.policy.remembers:
            recall(self._memory, table)
            if "group_cutoff" in self._adapts:
                self.limits["group_cutoff"] = cutoff(self._memory)
            if "group_size" in self._adapts:
                self.limits["group_size"] = group_size(self._memory.frame, engine, table, now_s)
        seconds, composition = self.policy.form(engine, table, now_s, tokens)
        self._ran = table["id"][tokens > 0]
        if self.policy.remembers:
            record(self._memory, table, tokens, now_s, seconds)
        return tokens, seconds, composition

    def late(self, table: np.ndarray, now_s: float) -> np.ndarray:
        """Which rows can no longer be on time (bool[rows]); they stand behind those that can."""
        found: np.ndarray = find_late(EngineModel(self.coefficients, self.limits), table, now_s)
        return found

    @property
    def error(self) -> float:
        """Mean absolute error of predictions, as part of the time measured."""
        return float(self._correction[ERROR])

    def set_lead(self, seconds: float, share: float) -> None:
        """How long before the end of an iteration the next one is formed, unless the options say it."""
        if "lead_s" in self._adapts:
            self.limits["lead_s"], self.limits["lead_share"] = seconds, share

    @property
    def lead(self) -> tuple[float, float]:
        """``lead_s`` and ``lead_share`` of the limits; inf: vLLM's own scheduler forms every iteration at once."""
        is_own = self.policy.name == VLLM_DEFAULT
        return (math.inf, 0.0) if is_own else (float(self.limits["lead_s"]), float(self.limits["lead_share"]))

    def predict(self, composition: np.ndarray) -> float:
        """Seconds of an iteration of this composition."""
        return float(iteration_s(self.coefficients, *composition))

    def plan_drafts(self, table: np.ndarray, now_s: float, max_drafts: int) -> None:
        """Shorten ``spec_tokens`` of the table to what objectives need (SLOs-Serve 3.2.3), if the policy does that.

        Where no objective can be planned for, as for best effort alone, they get as deep as yields most tokens. Now and
        then each decode keeps ``EXPLORED``, from which its acceptance is learnt.
        """
        if self.policy.plans_drafts:
            engine, drafts = EngineModel(self.coefficients, self.limits), np.zeros(len(table), dtype=np.int32)
            if plan_drafts(engine, table, now_s, max_drafts, drafts) == math.inf:
                drafts[:] = fastest_depth(engine, table)
            self._drafting_steps += 1
            every = EXPLORE_EVERY if self._streams.is_known else EXPLORE_UNKNOWN_EVERY
            explored = (table["id"] + self._drafting_steps) % every == 0  # not all in the same step
            np.maximum(drafts, EXPLORED, out=drafts, where=explored)
            left = table["prompt_tokens"] + table["emitted_tokens"] - table["computed_tokens"]
            unproposed = table["id"][(drafts > 0) & (table["spec_tokens"] == 0) & table["running"] & (left == 1)]
            for uid in unproposed[np.isin(unproposed, self._ran)].tolist():  # nothing is proposed to who was left out
                self._streams.record(uid, 0, 1)
            np.minimum(table["spec_tokens"], drafts, out=table["spec_tokens"])

    def record_acceptance(self, tested: Mapping[int, tuple[int, int]]) -> None:
        """Learn from one iteration by uid: draft tokens that were accepted, and whether the next one was not."""
        for uid, (kept, is_refused) in tested.items():
            self._streams.record(uid, kept, is_refused)
        accepted, tokens = sum(kept for kept, _ in tested.values()), sum(map(sum, tested.values()))
        weight, target = PRIOR_WEIGHT, ACCEPTANCE_PRIOR
        if tokens:
            weight, target = 1 - (1 - ACCEPTANCE_WEIGHT) ** tokens, accepted / tokens
        self._acceptance += weight * (target - self._acceptance)
        self.limits["acceptance"] = min(self._acceptance, 0.99)

    @property
    def promised_acceptance(self) -> float:
        """The chance that a draft token is accepted by which promises may be made; 0 where a policy drafts at will."""
        return self._streams.bound if self.policy.plans_drafts else 0.0

    def observe(self, composition: np.ndarray, seconds: float) -> None:
        """Learn from an iteration of composition ``composition`` that took ``seconds``."""
        if not self.is_ready:
            self._learn_speed(seconds / self.predict(composition))
        elif self._learn:
            own_s = self._draft_cost.observe(float(composition[DRAFT_TOKENS]), self.predict(composition), seconds)
            self._correction = observe(self._correction, self._profile, composition, own_s)
            self.coefficients = corrected(self._profile, self._correction)
            self.coefficients[K_SPEC] += self._draft_cost.draft_s
            self.limits["slack_margin"] = reach(self._correction)

    def learn_speed(self) -> None:
        """Take the profile for another engine's of the same form: the first ``SPEED_STEPS`` iterations scale it."""
        self.is_ready = False

    def _learn_speed(self, ratio: float) -> None:
        """The median of several ratios is the engine's speed: single iterations compile, or are stalled."""
        self._speeds.append(ratio)
        if len(self._speeds) >= SPEED_STEPS:
            self._profile = self._profile * float(np.median(self._speeds))
            self.coefficients, self._correction = self._profile, new_correction(self._profile)
            self.is_ready = True


def profile_coefficients(name: str, speed: float = 1.0) -> tuple[np.ndarray, int]:
    """Coefficients and KV capacity of the named profile, ``speed`` times as fast; raises ``ValueError``."""
    profile = load_profile(name)
    return profile.coefficients / speed, profile.kv_capacity_tokens
