"""What a program presumably still needs, by the graphs that it was matched with, or by priors. Pure."""

import numpy as np

from controller.programs.history import History, Match
from controller.programs.open_program import OpenProgram
from planning.programs.deadlines import PRIOR_STAGES
from planning.programs.load import WorkCosts, stage_work_s


def expect(program: OpenProgram, history: History, match: Match, costs: WorkCosts) -> None:
    """Note the prompt tokens and the work that a program has left, as its latest sub-request begins.

    The work is a mean: what many programs need together is close to the sum of their means. An unknown program has
    ``PRIOR_STAGES`` stages like its latest one.
    """
    stages, prompt_tokens = program.stages(), float(program.nodes["input_tokens"][-1])
    at = int(program.nodes["stage"][-1])
    own_s = float(stage_work_s(stages[at : at + 1], costs)[0])
    known = history.table.stages[match.rows]
    if len(known) and match.similarity.sum() > 0.0:
        weights = match.similarity / match.similarity.sum()
        seconds = weights @ stage_work_s(known[:, at:], costs)
        program.expected_tokens = float(np.median(known["input_tokens"].sum(axis=1)))
        this_s, program.later_work_s = max(own_s, float(seconds[:1].sum())), float(seconds[1:].sum())
    else:
        this_s, program.later_work_s = own_s, max(0.0, PRIOR_STAGES - at - 1.0) * own_s
        program.expected_tokens = 0.0
    program.expected_tokens = max(PRIOR_STAGES * prompt_tokens, program.expected_tokens)
    program.work_s = this_s + program.later_work_s
    program.context_tokens = max(program.context_tokens, prompt_tokens)
