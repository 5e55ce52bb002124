"""What a program presumably still needs, by the graphs that it was matched with, or by priors. Pure."""

import numpy as np

from controller.programs.history import History, Match
from controller.programs.open_program import Left, OpenProgram
from planning.programs.deadlines import PRIOR_STAGES, Outlook, StageClock
from planning.programs.graph import Stages
from planning.programs.load import WorkCosts, again_s, stage_work_s
from protocol.programs import INF


def expect(
    program: OpenProgram, history: History, match: Match, costs: WorkCosts, seen: Outlook, clock: StageClock
) -> None:
    """Note the prompt tokens and the work that a program has left, as its latest sub-request begins.

    The work is a mean: what many programs need together is close to the sum of their means. Graphs that could not end
    by the deadline are left out where others can: a client sets a deadline by the size of its task. An unknown program
    has ``PRIOR_STAGES`` stages like its latest one. Where that is the last, nothing is later.

    Args:
        seen: what the matched graphs say of it from its latest stage on.
        clock: where it stands as that sub-request asks.
    """
    stages, prompt_tokens = program.stages(), float(program.nodes["input_tokens"][-1])
    at = int(program.nodes["stage"][-1])
    own_s = float(stage_work_s(stages[at : at + 1], costs)[0])
    known = history.table.stages[match.rows]
    if len(known) and match.similarity.sum() > 0.0:
        left, later = _as_known(known[:, at : at + 1 if seen.is_end else None], costs, seen, clock)
        expected_tokens = float(np.median(known["input_tokens"].sum(axis=1)))
    else:
        later_s, expected_tokens = 0.0 if seen.is_end else max(0.0, PRIOR_STAGES - at - 1.0) * own_s, 0.0
        later = Left(later_s, later_s, all_idle_s=later_s)
        left = Left(own_s + later_s, own_s + later_s, all_idle_s=own_s + later_s)
    work_s, context_tokens = max(left.work_s, own_s + later.work_s), max(left.context_tokens, prompt_tokens)
    program.left = left._replace(work_s=work_s, context_tokens=context_tokens)
    program.later = later._replace(context_tokens=context_tokens)
    program.patience_s = patience_s(known)
    program.expected_tokens = max(PRIOR_STAGES * prompt_tokens, expected_tokens)


def patience_s(known: Stages) -> float:
    """After how long without a call a program like these (STAGE[k, S]) has more likely ended than not.

    One of ``n`` calls is the last. A gap of which one in ``n`` others is longer says as much for an end as against it.
    """
    gaps_s = known["gap_s"][:, 1:][known["requests"][:, 1:] > 0.0]
    if not len(gaps_s):
        return INF
    calls = 1.0 + len(gaps_s) / len(known)
    return float(np.quantile(gaps_s, 1.0 - 1.0 / calls))


def _as_known(known: Stages, costs: WorkCosts, seen: Outlook, clock: StageClock) -> tuple[Left, Left]:
    """What is left from this stage on, and after it, by known graphs from this stage on (STAGE[k, S])."""
    every = _normed(seen.weights[:-1], seen.weights[:-1])  # the last one is the prior
    weights = _normed(seen.within(clock).weights[:-1], every)
    this_s, later_s, gaps_s = seen.this_s[:-1], seen.later_s[:-1], seen.later_gaps_s[:-1]
    work_s = weights @ stage_work_s(known, costs)
    context = known["input_tokens"].sum(axis=1) / np.maximum(known["requests"].sum(axis=1), 1.0)
    left = Left(
        work_s=float(work_s.sum()),
        idle_s=float(weights @ (this_s + later_s)),
        gaps_s=float(weights @ gaps_s),
        again_s=float(weights @ again_s(known[:, 1:], costs).sum(axis=1)),
        context_tokens=float(weights @ context),
        all_idle_s=float(every @ (this_s + later_s)),
        all_gaps_s=float(every @ gaps_s),
    )
    return left, left._replace(
        work_s=float(work_s[1:].sum()), idle_s=float(weights @ later_s), all_idle_s=float(every @ later_s)
    )


def _normed(weights: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Weights with sum 1; ``otherwise`` where all are 0."""
    total = float(weights.sum())
    return weights / total if total > 0.0 else otherwise
