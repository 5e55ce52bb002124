"""The programs of the live benchmark in virtual time: prompts share what their conversations hold, and nothing else."""

import numpy as np

from benchmarks.program_sessions import LiveLoad
from benchmarks.programs_virtual import engine, line, with_blocks
from simulation.core.jobs import EDGE, NEVER, make_jobs
from simulation.workloads.programs import ProgramLoad


def test_a_call_shares_the_blocks_of_the_conversation_that_it_continues() -> None:
    jobs = make_jobs(3)
    jobs["program"], jobs["follower"] = [0, 0, 2], [1, NEVER, NEVER]
    jobs["prompt_tokens"], jobs["output_tokens"] = [40, 100, 40], [30, 10, 30]
    load = ProgramLoad(jobs, np.zeros(0, dtype=EDGE), ("coding",) * 3)
    live, ids = with_blocks(LiveLoad(load, (int(NEVER), 0, int(NEVER))), 16)
    first, second, other = (
        ids[job["first_block"] : job["first_block"] + job["blocks"]].tolist() for job in live.load.jobs
    )
    assert (len(first), len(second), len(other)) == (2, 6, 2)
    assert second[:2] == first
    assert len({*first, *second, *other}) == 2 + 4 + 2, (
        "outputs are blocks of the next prompt; other programs share none"
    )


def test_a_row_has_shares_of_all_programs() -> None:
    point = {"slowdown": 1.5, "per_s": 0.5, "system": "polyslo", "in_time": 0.5, "promised_first": 0.5, "on_time": 0.4,
             "cached": 0.8}  # fmt: skip
    assert line([point, {**point, "on_time": 0.2}]) == "| 1.5 | 0.5 | polyslo | 0.50 | 0.30 | 0.60 | 0.80 |"
    assert "|  |  |" in line([{**point, "promised_first": 0.0, "on_time": 0.0}])


def test_engines_have_the_cache_of_the_live_benchmark() -> None:
    assert engine().kv_capacity_tokens == 26_000
