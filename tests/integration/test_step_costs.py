"""The benchmark of a step's cost on a small crowd: both turns run in one engine process, and both are counted."""

import asyncio

import pytest

from tests.support.fleet_cases import H200

pytestmark = [pytest.mark.integration, pytest.mark.alone, pytest.mark.timeout(300)]


def test_both_costs_of_a_step_are_measured() -> None:
    from benchmarks.engine_steps import measure_steps

    small, large = asyncio.run(measure_steps(H200, (8, 24), turns=4))
    assert (small["running"], large["running"]) == (8, 24)
    for point in (small, large):
        assert min(point["steps_slo"], point["steps_vllm"]) >= 20
        assert point["added_us"] > 0
    assert large["stock_us"] > small["stock_us"]
