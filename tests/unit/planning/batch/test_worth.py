"""Service gain, token goodput, and the policies that order by them."""

import math

import numpy as np
import pytest

from planning.batch.calm import best_group
from planning.batch.fair import QUANTUM_STEPS, at_boundary, blend
from planning.batch.kv import PREEMPT
from planning.batch.registry import batch_policy
from planning.batch.tempo import interruption_costs
from planning.batch.worth import chances_in_time, finish_chance, prospects, service_gain, token_goodput
from planning.engine import EngineModel
from planning.limits import make_limits
from planning.tables import request_table

COEF = np.array([1e-5, 1e-3, 4e-5, 0.0, 1e-8, 1e-9, 1e-5, 1e-4])


def rows(count: int, **fields: object) -> np.ndarray:
    """Requests of 100 tokens with 50 to come, two seconds old."""
    table = request_table(count)
    table["id"], table["best_effort"] = np.arange(count) + 1, False
    table["prompt_tokens"], table["output_tokens"], table["output_cap_tokens"] = 100, 50, 400
    for name, value in fields.items():
        table[name] = value
    return table


def batch(name: str, table: np.ndarray, places: int, **limits: float) -> list[int]:
    tokens = np.zeros(len(table), dtype=np.int32)
    made = make_limits(100_000, max_running=places, max_batch_tokens=512)
    for field, value in limits.items():
        made[field] = value
    batch_policy(name).form(EngineModel(COEF, made), table, 2.0, tokens)
    return tokens.tolist()


def test_equation_2_counts_all_tokens_and_decays_with_the_deadline() -> None:
    (row,) = rows(1, deadline_s=10.0)
    assert service_gain(row, 2.0, 0.1, 4.0, 0.0) == 100 + 2 * 50
    assert service_gain(row, 2.0, 0.1, 18.0, 0.0) == pytest.approx(200 * 10.0 / 20.0)
    assert service_gain(row, 2.0, 0.1, 4.0, 300.0) == 500
    (free,) = rows(1, best_effort=True)
    assert service_gain(free, 2.0, 0.1, 4.0, 0.0) == 0.0


def test_equation_3_counts_tokens_by_their_line() -> None:
    (row,) = rows(1, ttft_s=4.0, tpot_s=0.1)
    assert service_gain(row, 2.0, 0.1, 4.0, 0.0) == pytest.approx(200)
    late = service_gain(row, 10.0, 0.1, 0.1 + 49 * 0.1, 0.0)
    samples = [(4.0 + part * 4.9) / (10.1 + part * 4.9) for part in (0.125, 0.375, 0.625, 0.875)]
    assert late == pytest.approx(100 * 4.0 / 10.1 + 100 * np.mean(samples))


def test_goodput_is_all_or_nothing_by_deadline_and_token_by_token_by_line() -> None:
    (deadline,) = rows(1, deadline_s=10.0)
    assert token_goodput(deadline, 2.0, 0.1, 7.9, 0.0, 1.0) == pytest.approx(150, abs=1)
    assert token_goodput(deadline, 2.0, 0.1, 7.9, 0.0, 0.5) == pytest.approx(75, abs=1)
    assert token_goodput(deadline, 2.0, 0.1, 8.1, 0.0, 0.0) < 1
    (line,) = rows(1, ttft_s=1.0, tpot_s=0.1)
    # 1.1 s late and 0.05 s faster than its line with each token: the first 22 tokens are late.
    assert token_goodput(line, 2.0, 0.1, 0.1 + 49 * 0.05, 0.0, 1.0) == pytest.approx(50 - 22, abs=1)
    (free,) = rows(1, best_effort=True)
    assert token_goodput(free, 2.0, 0.1, 4.0, 0.0, 1.0) == pytest.approx(150, abs=1), "a default deadline"


@pytest.mark.parametrize(("emitted", "tokens"), [(0, 100), (0, 800), (300, 50), (300, 500), (1500, 200)])
def test_the_chance_to_finish_is_that_of_log_normal_lengths(emitted: int, tokens: int) -> None:
    """Against a million drawn lengths of this mean and P90, of which those count that got so far."""
    mean, sigma = 400.0, 0.9
    drawn = np.random.default_rng(1).lognormal(np.log(mean) - 0.5 * sigma**2, sigma, 1_000_000)
    (row,) = rows(1, output_tokens=400, output_cap_tokens=100_000, emitted_tokens=emitted)
    row["output_bound_tokens"] = round(float(np.quantile(drawn, 0.9)))
    counted = drawn[drawn > emitted]
    assert finish_chance(row, tokens) == pytest.approx((counted <= emitted + tokens).mean(), abs=0.01)


def test_a_bound_that_is_the_mean_leaves_no_doubt_and_a_cap_none_beyond_it() -> None:
    (row,) = rows(1, output_tokens=400, output_cap_tokens=1000, emitted_tokens=100, output_bound_tokens=400)
    assert (finish_chance(row, 299), finish_chance(row, 300)) == (0.0, 1.0)
    row["output_bound_tokens"] = 2000
    assert 0.0 < finish_chance(row, 899) < finish_chance(row, 900) == 1.0
    assert finish_chance(row, 0) == 0.0


def test_a_stage_is_in_time_if_all_siblings_are() -> None:
    engine = EngineModel(COEF, make_limits(100_000))
    table = rows(3, program=[4, 4, 0], output_tokens=[50, 200, 50], deadline_s=4.0)
    table["output_cap_tokens"], table["output_bound_tokens"] = 4000, [100, 500, 100]
    first, second, alone = chances_in_time(engine, table, 0.0, 0.02)
    assert first == second
    table["program"] = 0
    apart = chances_in_time(engine, table, 0.0, 0.02)
    assert first == pytest.approx(apart[0] * apart[1])
    assert alone == apart[2]
    table["deadline_s"] = np.inf
    assert chances_in_time(engine, table, 0.0, 0.02).tolist() == [1.0, 1.0, 1.0]


def test_a_tenant_alone_does_not_bring_priorities_nearer_to_each_other() -> None:
    table, priorities, costs = rows(3), np.array([8.0, 4.0, 1.0]), np.full(3, 2.0)
    blend(table, 0.3, priorities, costs)
    assert (priorities / priorities[0]).tolist() == pytest.approx([1.0, 0.5, 0.125])
    table["tenant_served"] = [1e6, 0.0, 0.0]
    priorities = np.array([8.0, 7.0, 1.0])
    blend(table, 0.3, priorities, costs)
    assert priorities[1] > priorities[0], "the other tenant was served less"


def test_waiting_raises_what_nothing_else_is_worth() -> None:
    (row,) = rows(1, deadline_s=1.0)
    assert token_goodput(row, 300.0, 0.1, 4.0, 0.0, 0.0) > token_goodput(row, 3.0, 0.1, 4.0, 0.0, 0.0) > 0.0


def test_siblings_take_as_long_as_the_slowest_and_share_what_was_given_before() -> None:
    table = rows(3, program=[4, 4, 0], output_tokens=[50, 200, 50], program_served=[600.0, 600.0, 0.0])
    table["computed_tokens"], table["running"] = [100, 0, 0], [True, False, False]
    rests, before = prospects(EngineModel(COEF, make_limits(10_000)), table, 0.1)
    assert rests[0] == rests[1] > rests[2]
    assert before.tolist() == [250.0, 250.0, 0.0]


def test_nobody_is_interrupted_inside_a_quantum_or_for_less_than_the_recompute() -> None:
    table = rows(2, running=True, emitted_tokens=[QUANTUM_STEPS, QUANTUM_STEPS + 1], deadline_s=10.0)
    table["computed_tokens"] = table["prompt_tokens"] + table["emitted_tokens"] - 1
    assert [bool(at_boundary(row, QUANTUM_STEPS)) for row in table] == [True, False]
    engine, priorities = EngineModel(COEF, make_limits(10_000)), np.array([10.0, 10.0])
    costs = interruption_costs(engine, table, priorities, np.array([1.0, 1.0]), QUANTUM_STEPS)
    assert 10.0 < costs[0] < math.inf == costs[1]
    near_its_end = interruption_costs(engine, table, priorities, np.array([0.01, 1.0]), QUANTUM_STEPS)
    assert near_its_end[0] > costs[0]


def running_at_boundary(**fields: object) -> np.ndarray:
    table = rows(2, **fields)
    table["running"], table["emitted_tokens"], table["computed_tokens"] = [True, False], [100, 0], [199, 0]
    table["output_tokens"] = [300, 200]
    return table


@pytest.mark.parametrize("name", ["tempo", "calm"])
def test_the_denser_request_takes_the_place_of_one_that_is_late_anyway(name: str) -> None:
    late = running_at_boundary(arrival_s=[-500.0, 1.9], deadline_s=[-490.0, 12.0])
    assert batch(name, late, 1) == [PREEMPT, 100]
    in_time = running_at_boundary(arrival_s=[1.0, 1.9], deadline_s=[22.0, 22.0])
    assert batch(name, in_time, 1) == [1, 0]


def test_tempo_keeps_a_share_of_the_places_for_requests_without_objective() -> None:
    table = rows(3, best_effort=[False, False, True], deadline_s=[9.0, 9.0, np.inf], arrival_s=[0.0, 0.0, 1.0])
    assert batch("tempo", table, 2, best_effort_share=0.1)[2] == 100
    assert batch("tempo", table, 2)[2] == 0


def test_tempos_share_is_one_of_the_kv_cache_too_and_holds_nobody_up() -> None:
    """By places alone ten of a hundred best-effort requests filled the cache, and what did not fit shut all others
    out."""
    table = rows(12, best_effort=[True] * 11 + [False], deadline_s=[np.inf] * 11 + [9.0])
    table["prompt_tokens"][:11] = 300
    tokens = batch("tempo", table, 100, best_effort_share=0.1, kv_capacity_tokens=1000, max_batch_tokens=2000)
    assert tokens[-1] == 100
    assert sum(each > 0 for each in tokens[:11]) == 2, "what is left is theirs"
    one_too_large = rows(2, best_effort=[True, False], prompt_tokens=[2000, 100], deadline_s=[np.inf, 9.0])
    assert batch("tempo", one_too_large, 100, best_effort_share=0.1, kv_capacity_tokens=1000) == [0, 100]


def test_calm_groups_by_length_what_is_worth_about_the_same() -> None:
    worth, lengths = np.array([10.0, 9.9, 9.8, 9.7]), np.array([10, 900, 12, 11])
    assert best_group(worth, lengths, 2, 1.0).tolist() == [True, True, False, False]
    assert best_group(worth, lengths, 2, 0.95).tolist() == [True, False, False, True]
    assert best_group(worth, lengths, 9, 0.5).all()
    alone = np.array([10.0, 9.9, 1.0, 1.0])
    assert best_group(alone, lengths, 2, 0.95).tolist() == [True, True, False, False]


def test_plas_serves_the_program_that_was_served_least() -> None:
    table = rows(2, program=[3, 4], program_served=[9000.0, 100.0], arrival_s=[0.0, 1.0])
    assert batch("plas", table, 1) == [0, 100]
    table["program_served"] = [100.0, 120.0]
    assert batch("plas", table, 1) == [100, 0], "one level, so the older one"


@pytest.mark.parametrize(("prompt", "emitted"), [(1000, 1000), (3000, 1000), (1000, 0)])
def test_plas_lets_two_that_do_not_both_fit_end(prompt: int, emitted: int) -> None:
    """They took each other's place for ever: who lost it was in a higher queue again."""
    whole = prompt + emitted + 100
    table = rows(2, prompt_tokens=prompt, emitted_tokens=emitted, output_tokens=emitted + 100)
    table["output_cap_tokens"] = emitted + 100
    table["running"][0], table["computed_tokens"][0] = True, prompt + emitted - 1 if emitted else 0
    preemptions = 0
    for _ in range(2000):
        tokens = np.array(batch("plas", table, 2, kv_capacity_tokens=int(1.7 * whole)))
        lost, runs = tokens == PREEMPT, tokens > 0
        preemptions += int(lost.sum())
        table["preempted_at"][lost], table["computed_tokens"][lost] = table["emitted_tokens"][lost] + 1, 0
        table["running"] = (table["running"] & ~lost) | runs
        table["computed_tokens"] += np.maximum(tokens, 0)
        table["emitted_tokens"] += table["computed_tokens"] == table["prompt_tokens"] + table["emitted_tokens"]
        table = table[table["emitted_tokens"] < table["output_cap_tokens"]]
        if not len(table):
            break
    assert not len(table)
    assert preemptions <= 4


def test_a_large_prompt_of_tempos_share_waits_for_room_and_gets_it() -> None:
    """While it does not fit beside what runs, small newcomers wait behind it: they would take every block that is
    free."""
    table = rows(3, best_effort=[True, False, False], deadline_s=[np.inf, 9.0, 9.0])
    table["prompt_tokens"] = [600, 300, 300]
    table["running"][1], table["computed_tokens"][1], table["emitted_tokens"][1] = True, 304, 5
    limits = {"best_effort_share": 0.1, "kv_capacity_tokens": 800}
    assert batch("tempo", table, 100, **limits) == [0, 1, 0]
    assert batch("tempo", table[[0, 2]].copy(), 100, **limits)[0] > 0


def test_hrrn_serves_the_highest_response_ratio_and_srpt_the_shortest() -> None:
    table = rows(2, prompt_tokens=[400, 100], arrival_s=[0.0, 1.0])
    assert batch("hrrn", table, 1) == [0, 100]
    table["arrival_s"] = [-9.0, 1.0]
    assert batch("hrrn", table, 1) == [400, 0]


def test_vtc_serves_the_tenant_that_was_served_least() -> None:
    table = rows(2, tenant=[1, 2], tenant_served=[50.0, 10.0], arrival_s=[0.0, 1.0])
    assert batch("vtc", table, 1) == [0, 100]


@pytest.mark.parametrize("name", ["edf", "tempo", "vllm"])
def test_nobody_takes_the_place_of_one_that_is_about_to_end(name: str) -> None:
    table = rows(2, best_effort=[True, False], deadline_s=[np.inf, 9.0], running=[True, False])
    table["computed_tokens"][0] = 100
    assert batch(name, table, 1) == [0, 0]
    table["computed_tokens"][0] = 99
    assert batch(name, table, 1) == ([1, 0] if name == "vllm" else [PREEMPT, 100])
    growing = rows(2, running=True, emitted_tokens=29, computed_tokens=[128, 129], deadline_s=[3.0, 9.0])
    assert batch(name, growing, 2, kv_capacity_tokens=272) == [0, 0]
