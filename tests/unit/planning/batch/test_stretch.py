"""How far best effort prolongs an iteration, by hand: the cost model of ``test_slo``."""

import math

import pytest

from planning.limits import make_limits
from tests.unit.planning.batch.test_slo import decodes, form, prompts, spare


@pytest.mark.parametrize(("ttft_s", "longest_s"), [(1.0, 0.00909), (0.01, 0.005), (0.001, 0.001515), (-3.0, 0.00909)])
def test_best_effort_leaves_newcomers_half_of_the_tightest_ttft(ttft_s: float, longest_s: float) -> None:
    """An empty iteration takes 1.01 ms, and best effort may add 8 of them, or half of one where a TTFT is tight."""
    limits = make_limits(10_000, block_tokens=1, max_iteration_s=0.2, best_effort_stretch=8.0)
    loose, tight = decodes([0.05, 0.05]), decodes([0.05])
    tight["ttft_s"], tight["arrival_s"] = ttft_s, tight["arrival_s"] + 1.0 - ttft_s
    seconds, tokens = form(loose, tight, spare(prompts([3000], [math.inf])), limits=limits)
    assert seconds == pytest.approx(longest_s, abs=5e-5)
    assert tokens[-1] > 0


@pytest.mark.parametrize(
    ("lead_s", "lead_share", "longest_s"), [(0.002, 0.0, 0.004), (0.001, 0.5, 0.0036), (0.008, 0.0, 0.00333)]
)
def test_it_leaves_them_the_lead_too(lead_s: float, lead_share: float, longest_s: float) -> None:
    """Of 10 ms they wait for the lead, an iteration and their own; never for more than a whole one before that."""
    limits = make_limits(10_000, block_tokens=1, best_effort_stretch=8.0, lead_s=lead_s, lead_share=lead_share)
    tight = decodes([0.05])
    tight["ttft_s"], tight["arrival_s"] = 0.01, tight["arrival_s"] + 0.99
    seconds, _ = form(decodes([0.05]), tight, spare(prompts([3000], [math.inf])), limits=limits)
    assert seconds == pytest.approx(longest_s, abs=5e-5)


@pytest.mark.parametrize(("share", "longest_s"), [(1 / 2, 0.005), (1 / 3, 0.00333)])
def test_it_leaves_them_more_where_they_wait_for_more_iterations(share: float, longest_s: float) -> None:
    limits = make_limits(10_000, block_tokens=1, best_effort_stretch=8.0, newcomer_share=share)
    tight = decodes([0.05])
    tight["ttft_s"], tight["arrival_s"] = 0.01, tight["arrival_s"] + 0.99
    seconds, _ = form(decodes([0.05]), tight, spare(prompts([3000], [math.inf])), limits=limits)
    assert seconds == pytest.approx(longest_s, abs=5e-5)
