"""The batch policies by name, for engines and the simulator. The controller forecasts with ``slo`` alone.

A policy is a kernel with the signature of ``planning.batch.slo.form_batch``. To add one, write the kernel in a file of
this folder and import it here; append a ``BatchPolicy``, its code and a branch of ``form``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numba import njit

from planning.batch.annealing import form_annealed
from planning.batch.baselines import (
    form_arrival_order,
    form_decode_first,
    form_earliest_deadline_first,
    form_highest_response_ratio,
    form_shortest_job_first,
    form_shortest_remaining_first,
    form_whole_prompts,
)
from planning.batch.calm import form_grouped_margin_goodput
from planning.batch.fair import form_least_attained_service, form_virtual_token_counter
from planning.batch.prefill_only import form_prefill_batch
from planning.batch.shedding import form_deadline_sized, form_decode_first_shed
from planning.batch.slo import form_batch
from planning.batch.tempo import form_largest_density_first
from planning.engine import EngineModel
from planning.tables import RequestTable
from profiles.suggest import suggest

# (engine, request table, start of the iteration, tokens_out) -> (predicted seconds, composition)
FormBatch = Callable[[EngineModel, np.ndarray, float, np.ndarray], tuple[float, np.ndarray]]


@dataclass(frozen=True)
class BatchPolicy:
    """One way to form batches."""

    name: str
    form: FormBatch
    plans_drafts: bool = False  # speculation is as long as objectives need, not as long as it can be
    plans_ahead: bool = False  # keeps to the limits that promises are made by
    sheds: bool = False  # requests that can no longer be in time become best effort before every iteration
    is_live: bool = True  # selectable in engines, not only in the simulator
    remembers: bool = False  # reads what ``planning.batch.memory`` keeps
    adapts_cutoff: bool = False  # ``limits["group_cutoff"]`` is the one that memory finds best, unless it is given
    needs_lengths: bool = False  # means what its name says only with true lengths
    options: Mapping[str, float] = field(default_factory=dict)  # limits that are its own unless others are given


# Without a second tenant fairness changes nothing. Tempo keeps a tenth of the batch for requests without objective.
FAIRNESS = 0.3
TEMPO_OPTIONS = {"best_effort_share": 0.1, "fairness": FAIRNESS}

# The position of a policy is its code in kernels; ``form`` has a branch for each.
POLICIES = (
    BatchPolicy("slo", form_batch, plans_drafts=True, plans_ahead=True),
    BatchPolicy("vllm", form_arrival_order),
    BatchPolicy("vllm-whole", form_whole_prompts, is_live=False),
    BatchPolicy("sarathi", form_decode_first),
    BatchPolicy("sarathi-shed", form_decode_first_shed, sheds=True, is_live=False),
    BatchPolicy("edf", form_earliest_deadline_first),
    BatchPolicy("edf-shed", form_deadline_sized, sheds=True, is_live=False),
    BatchPolicy("sjf", form_shortest_job_first),
    BatchPolicy("prefill", form_prefill_batch, is_live=False),
    BatchPolicy("tempo", form_largest_density_first, remembers=True, options=TEMPO_OPTIONS),
    BatchPolicy(
        "calm", form_grouped_margin_goodput, remembers=True, adapts_cutoff=True, options={"fairness": FAIRNESS}
    ),
    BatchPolicy("annealing", form_annealed),
    BatchPolicy("plas", form_least_attained_service, remembers=True),
    BatchPolicy("vtc", form_virtual_token_counter, remembers=True),
    BatchPolicy("hrrn", form_highest_response_ratio),
    BatchPolicy("srpt", form_shortest_remaining_first, is_live=False, needs_lengths=True),
)
SLO, VLLM, VLLM_WHOLE, SARATHI, SARATHI_SHED, EDF, EDF_SHED, SJF, PREFILL = range(9)
TEMPO, CALM, ANNEALING, PLAS, VTC, HRRN, SRPT = range(9, len(POLICIES))


def batch_policy_names() -> list[str]:
    """Names of the policies that an engine can run, sorted."""
    return sorted(policy.name for policy in POLICIES if policy.is_live)


def batch_policy(name: str) -> BatchPolicy:
    """The engine's policy of that name; raises ``ValueError`` listing the known ones."""
    for policy in POLICIES:
        if policy.name == name and policy.is_live:
            return policy
    raise ValueError(f"policy: unknown {name!r}; {suggest(name, list(batch_policy_names()))}")


def policy_code(name: str) -> int:
    """The code of any policy, for kernels; raises ``ValueError`` listing the known ones."""
    names = [policy.name for policy in POLICIES]
    if name not in names:
        raise ValueError(f"policy: unknown {name!r}; {suggest(name, list(names))}")
    return names.index(name)


@njit(cache=True)
def form(
    policy: int, engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """One iteration by the policy of this code; see ``planning.batch.slo.form_batch`` for what comes back."""
    if policy == SLO:
        return form_batch(engine, table, now_s, tokens_out)
    if policy == VLLM:
        return form_arrival_order(engine, table, now_s, tokens_out)
    if policy == VLLM_WHOLE:
        return form_whole_prompts(engine, table, now_s, tokens_out)
    if policy == SARATHI:
        return form_decode_first(engine, table, now_s, tokens_out)
    if policy == SARATHI_SHED:
        return form_decode_first_shed(engine, table, now_s, tokens_out)
    if policy == EDF:
        return form_earliest_deadline_first(engine, table, now_s, tokens_out)
    if policy == EDF_SHED:
        return form_deadline_sized(engine, table, now_s, tokens_out)
    if policy == SJF:
        return form_shortest_job_first(engine, table, now_s, tokens_out)
    if policy == PREFILL:
        return form_prefill_batch(engine, table, now_s, tokens_out)
    return _form_by_worth(policy, engine, table, now_s, tokens_out)


@njit(cache=True)
def _form_by_worth(
    policy: int, engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    if policy == TEMPO:
        return form_largest_density_first(engine, table, now_s, tokens_out)
    if policy == CALM:
        return form_grouped_margin_goodput(engine, table, now_s, tokens_out)
    if policy == ANNEALING:
        return form_annealed(engine, table, now_s, tokens_out)
    if policy == PLAS:
        return form_least_attained_service(engine, table, now_s, tokens_out)
    if policy == VTC:
        return form_virtual_token_counter(engine, table, now_s, tokens_out)
    if policy == HRRN:
        return form_highest_response_ratio(engine, table, now_s, tokens_out)
    if policy == SRPT:
        return form_shortest_remaining_first(engine, table, now_s, tokens_out)
    raise ValueError("a batch policy without a branch")
