"""The experiments of Tempo, Concord and the annealing paper: workloads, headlines, one small run each."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulation.core.jobs import all_edges
from simulation.experiments.registry import Context, experiment
from simulation.workloads.applications import APPLICATIONS, COMPOUND, KINDS, mixed_jobs, with_true_lengths

NOWHERE = Context(Path(), lambda: 0.0)


def test_compound_requests_are_stages_of_parallel_calls() -> None:
    jobs, more = mixed_jobs(["chatbot"], (0, 0, 1), 1.0, 5, 3)
    app, edges = APPLICATIONS["chatbot"], all_edges(jobs, more)
    assert len(jobs) == 5 * app.stages * app.calls
    assert np.bincount(edges["follower"])[app.calls : app.stages * app.calls].tolist() == [app.calls] * (
        (app.stages - 1) * app.calls
    )
    assert (np.isfinite(jobs["arrival_s"]).reshape(5, -1).sum(axis=1) == app.calls).all()
    assert set(jobs["program"].tolist()) == set(range(0, len(jobs), app.stages * app.calls))
    assert (jobs["program_e2e_s"] == 20.0 * app.stages).all()


def test_kinds_come_in_their_shares_and_requests_do_not_depend_on_the_rate() -> None:
    jobs, _ = mixed_jobs(["chatbot", "math"], (3, 1, 1), 2.0, 2000, 4)
    heads = jobs[jobs["program"] == np.arange(len(jobs))]
    assert np.bincount(heads["tier"], minlength=len(KINDS)) / 2000 == pytest.approx([0.6, 0.2, 0.2], abs=0.03)
    faster, _ = mixed_jobs(["chatbot", "math"], (3, 1, 1), 4.0, 2000, 4)
    assert (faster["output_tokens"] == jobs["output_tokens"]).all()
    finite = np.isfinite(jobs["arrival_s"])
    assert faster["arrival_s"][finite] == pytest.approx(jobs["arrival_s"][finite] / 2)
    assert len(np.unique(jobs["predicted_tokens"])) == 6, "one mean per kind and application"
    assert (with_true_lengths(jobs)["predicted_tokens"] == jobs["output_tokens"]).all()
    assert (jobs["tier"][np.isinf(jobs["arrival_s"])] == COMPOUND).all()


def point(name: str, gain: float, tokens: float = 1.0, baseline: bool = False) -> dict[str, Any]:
    figures = ("gain_per_s", "goodput_tokens_per_s", "goodput_per_s", "tokens_per_s", "met_0", "met_1", "met_2")
    values = dict.fromkeys(figures, gain) | {"tokens_per_s": tokens}
    rates = {"2.0": {key: {"median": v, "low": v, "high": v, "seeds": [v, v]} for key, v in values.items()}}
    return {"contender": name, "is_baseline": baseline, "replicas": 1, "setting": "s", "tuning": {}, "rates": rates}


def test_headlines_of_known_points() -> None:
    tempo = experiment("tempo").headline([point("tempo", 6.0, 0.97), point("vllm", 2.0), point("sarathi", 3.0, 1.0)])
    assert (tempo["service_gain_ratio"], tempo["throughput_ratio_vs_sarathi_min"]) == (3.0, 0.97)
    assert tempo["service_gain_vs_best_baseline"] == 2.0
    assert (tempo["goodput_ratio"], tempo["throughput_ratio_vs_sarathi"]) == (3.0, 0.97)
    assert "throughput_ratio_when_widest" not in tempo
    best, widest = (
        [point("tempo", 6.0, 0.7), point("vllm", 2.0), point("sarathi", 3.0)],
        [(4.0, 0.98), (1.0, 0.0), (3.0, 1.0)],
    )
    for one, (gain, tokens) in zip(best, widest, strict=True):
        one |= {"compared_at": "wide", "compared_rates": point("", gain, tokens)["rates"]}
    tempo = experiment("tempo").headline(best)
    assert (tempo["service_gain_ratio_when_widest"], tempo["throughput_ratio_when_widest_min"]) == (4.0, 0.98)
    assert (tempo["service_gain_ratio"], tempo["throughput_ratio_vs_sarathi"]) == (3.0, 0.7)
    assert "| tempo | wide |" in experiment("tempo").tables(best)
    points = [point("calm", 6.0), point("calm, true lengths", 8.0), point("sjf", 5.0), point("vllm", 3.0)]
    concord = experiment("concord").headline(points)
    assert (concord["goodput_ratio_best_baseline"], concord["of_oracle_min"]) == (1.2, 0.75)
    assert "| calm | s |" in experiment("concord").tables(points)


@pytest.mark.parametrize("name", ["tempo", "concord"])
def test_a_small_run_of_every_contender(name: str) -> None:
    chosen = experiment(name)
    config = {**chosen.config(True), "contenders": chosen.config(False)["contenders"], "programs": 25, "rates": [5.0]}
    points = [chosen.run(task.params, NOWHERE) for task in chosen.tasks({**config, "replicas": [1, 2]})]
    assert len(points) == 2 * len(config["contenders"])
    assert all(p["rates"]["5.0"]["tokens_per_s"]["median"] > 0 for p in points)


@pytest.mark.parametrize("name", ["tempo", "concord"])
def test_contenders_that_decide_otherwise_behave_otherwise(name: str) -> None:
    """Else points that are kept would hold whatever a policy decides by now."""
    chosen = experiment(name)
    config = {**chosen.config(True), "contenders": chosen.config(False)["contenders"], "replicas": [1]}
    told = {task.params["contender"]: chosen.behaviour(task.params, NOWHERE) for task in chosen.tasks(config)}
    assert told == {task.params["contender"]: chosen.behaviour(task.params, NOWHERE) for task in chosen.tasks(config)}
    assert told.pop("sarathi") == told["vllm"], "prompts are cut alike"
    assert len(set(told.values())) == len(told)


def test_a_small_annealing_run() -> None:
    chosen = experiment("annealing")
    task = chosen.tasks({**chosen.config(True), "counts": [4], "limits": [2], "draws": 2})[0]
    found = chosen.run(task.params, NOWHERE)
    assert 0.5 < min(found["of_exhaustive"]) <= 1.0
    assert chosen.headline([found])["of_exhaustive_min"] > 0.5
    assert "| 4 | 2 |" in chosen.tables([found])
