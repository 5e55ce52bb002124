"""Agent programs as workloads."""

import numpy as np
import pytest

from planning.programs.graph import to_stages
from profiles.store import load_profile
from simulation.core.jobs import EDGE, NEVER, make_jobs
from simulation.workloads.programs import ProgramLoad, research, together

COEF = load_profile("h200_sxm__llama-3.1-8b").coefficients


def fork() -> ProgramLoad:
    """A plan, two searches side by side after 2 and 5 s of tools, and an answer."""
    jobs = make_jobs(4)
    jobs["program"], jobs["arrival_s"] = 0, (3.0, np.inf, np.inf, np.inf)
    jobs["prompt_tokens"], jobs["output_tokens"] = (1000, 1200, 500, 2000), (100, 50, 400, 20)
    jobs["follower"], jobs["think_s"] = (1, 3, 3, NEVER), (2.0, 0.0, 0.0, 0.0)
    return ProgramLoad(jobs, np.array([(0, 2, 5.0)], dtype=EDGE), ("a",) * 4)


def test_a_deadline_is_the_critical_path_with_longer_calls_and_tools_as_they_are() -> None:
    load = fork()
    calls = load.call_s(COEF)
    assert load.end_s(calls)[3] == pytest.approx(calls[0] + max(2.0 + calls[1], 5.0 + calls[2]) + calls[3])
    due = load.deadlines_s(COEF, 3.0)[0]
    assert due == pytest.approx(3 * calls[0] + max(2.0 + 3 * calls[1], 5.0 + 3 * calls[2]) + 3 * calls[3])


def test_a_conversation_that_grows_is_computed_once() -> None:
    assert fork().fresh_tokens().tolist() == [1000, 100, 500, 750]


def test_clients_tell_parents_and_no_more() -> None:
    told = fork().told({0: 60.0})
    assert [told[job].parents for job in range(4)] == [(), ("0",), ("0",), ("1", "2")]
    assert {(p.id, p.deadline_s, p.is_last) for p in told.values()} == {("0", 60.0, False)}


def test_graphs_are_those_of_an_idle_engine() -> None:
    ((app, nodes),) = fork().graphs(COEF)
    stages = to_stages(nodes)
    assert app == "a"
    assert stages["requests"].tolist() == [1, 2, 1]
    assert stages["gap_s"].tolist() == pytest.approx([0.0, 2.0, 0.0])


def test_research_programs_are_graphs_of_their_own() -> None:
    load = research(np.random.default_rng(1), np.array([0.0, 1.0, 2.0]))
    both = together(load, load)
    heads = both.jobs["program"]
    assert len(both.apps) == len(both.jobs) == 2 * len(load.jobs)
    for job, before in enumerate(both.calls_before()):
        assert (len(before) == 0) == (heads[job] == job), "only first calls wait for none"
        assert all(heads[other] == heads[job] for other, _ in before)
    assert all(both.jobs["follower"][job] != NEVER for job in both.edges["job"]), "the loop releases those alone"
