"""PolyServe's workload and the optimum of its section 3.5."""

import numpy as np
import pytest

from profiles.kernels import B_1, B_2, K1_1, K1_2, K_KV, K_SEQ, iteration_s
from profiles.store import load_profile
from simulation.studies.bound import ATTAINED
from simulation.studies.polyserve_bound import optimum_per_s, tier_costs_s
from simulation.workloads.lengths import Empirical
from simulation.workloads.polyserve import (
    SHARES,
    TPOT_S,
    TTFT_S,
    TieredLoad,
)
from simulation.workloads.scenarios import zero_load_ttft_s
from simulation.workloads.split import split_jobs_over_link

PROFILE = load_profile("h200_sxm__llama-3.1-8b")
LOAD = TieredLoad(Empirical([500, 12_000, 25_000, 60_000]), Empirical([50, 150]))


def test_only_ttfts_that_an_idle_replica_can_meet_are_asked_for() -> None:
    jobs = LOAD.jobs(PROFILE, 10.0, 4000, 1)
    idle_s = zero_load_ttft_s(PROFILE.coefficients, jobs["prompt_tokens"].astype(np.float64))
    assert (idle_s <= jobs["ttft_s"]).all()
    assert set(np.unique(jobs["ttft_s"])) == set(TTFT_S)
    assert 60_000 not in jobs["prompt_tokens"]
    assert LOAD.unattainable(PROFILE) == pytest.approx(0.25, abs=0.02)


def test_shares_of_the_tiers_and_their_inversion_halfway() -> None:
    load = TieredLoad(Empirical([100]), Empirical([100]), later_shares=SHARES[::-1])
    tiers = load.jobs(PROFILE, 10.0, 20_000, 2)["tier"]
    first, second = (np.bincount(half, minlength=4) / 10_000 for half in (tiers[:10_000], tiers[10_000:]))
    assert first == pytest.approx(np.array(SHARES), abs=0.02)
    assert second == pytest.approx(np.array(SHARES[::-1]), abs=0.02)


def test_a_seed_gives_the_same_requests_at_every_rate_and_length() -> None:
    short, long = LOAD.jobs(PROFILE, 10.0, 500, 3), LOAD.jobs(PROFILE, 20.0, 900, 3)
    for name in ("prompt_tokens", "output_tokens", "ttft_s", "tier"):
        assert (short[name] == long[name][:500]).all()
    assert short["arrival_s"] == pytest.approx(2.0 * long["arrival_s"][:500])


def test_the_cost_of_one_tier_is_that_of_full_iterations_as_long_as_its_tpot() -> None:
    jobs = TieredLoad(Empirical([64]), Empirical([65]), shares=(0.0, 0.0, 1.0, 0.0)).jobs(PROFILE, 1.0, 2000, 4)
    coef, cost_s = PROFILE.coefficients, tier_costs_s(jobs, PROFILE, is_split=False)[2]
    # So many requests decode in every iteration that it lasts exactly the TPOT; each needs 64 of them.
    decodes = TPOT_S[2] / cost_s * 64
    prompt_tokens = decodes  # 64 of them for every 64 steps
    kv_tokens = decodes * (64 + 32 + 1)
    full_s = iteration_s(
        coef, decodes + prompt_tokens, kv_tokens, 0.5 * prompt_tokens * 64, decodes + prompt_tokens / 64, 0.0
    )
    assert full_s == pytest.approx(TPOT_S[2], rel=0.01)


def test_kv_binds_long_contexts() -> None:
    jobs = TieredLoad(Empirical([4000]), Empirical([2001])).jobs(PROFILE, 1.0, 2000, 5)
    costs_s = tier_costs_s(jobs, PROFILE, is_split=False)
    coef = PROFILE.coefficients
    time_s = min(coef[K1_1], coef[K1_2]) * 6000 + 2000 * (coef[K_SEQ] + coef[K_KV] * 5001)
    assert (costs_s[1:] <= 1.01 * costs_s[:-1]).all(), "a looser TPOT never costs more, but for the grid"
    assert costs_s[3] > time_s + min(coef[B_1], coef[B_2]), "more than its work alone"


def test_the_bound_allows_for_the_share_that_may_be_missed() -> None:
    jobs = LOAD.jobs(PROFILE, 1.0, 2000, 6)
    shares = np.bincount(jobs["tier"], minlength=4) / len(jobs)
    cost_s = float(np.dot(shares, tier_costs_s(jobs, PROFILE, is_split=True)))
    assert optimum_per_s(jobs, PROFILE, 20, is_split=True) == pytest.approx(20 / cost_s / ATTAINED)


def test_kv_takes_its_time_over_the_link() -> None:
    jobs = LOAD.jobs(PROFILE, 1.0, 10, 7)
    split = split_jobs_over_link(jobs)
    prompts = split[split["prefilled"] == 0]
    assert len(prompts) == 10
    assert prompts["think_s"] == pytest.approx(jobs["prompt_tokens"] * (131072 / 50e9))
