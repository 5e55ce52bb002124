"""What is kept for best effort keeps the eldest of it running, too."""

import pytest

from planning.batch.kv import PREEMPT
from planning.limits import make_limits
from tests.unit.planning.batch.test_slo import decodes, form, prompts, spare


@pytest.mark.parametrize(
    ("share", "prompt_tokens", "taken"),
    [(0.0, 900, [PREEMPT, PREEMPT, 900]), (0.1, 840, [1, PREEMPT, 840]), (0.1, 900, [1, 1, 0])],
)
def test_the_eldest_best_effort_yields_to_nobody_where_a_share_is_kept(
    share: float, prompt_tokens: int, taken: list[int]
) -> None:
    limits = make_limits(1000, block_tokens=1, best_effort_share=share)
    eldest, young = spare(decodes([1.0])), spare(decodes([1.5]))
    for table, name, arrival_s in ((eldest, 1, -9.0), (young, 2, -1.0)):
        table["id"], table["arrival_s"] = name, arrival_s
        table["prompt_tokens"] = table["computed_tokens"] = 150
    eldest["output_tokens"] = eldest["output_cap_tokens"] = 500  # so it would be the cheaper one to take from
    assert form(eldest, young, prompts([prompt_tokens], [1.0]), limits=limits)[1] == taken


def test_best_effort_that_holds_much_of_the_kv_cache_yields_though_it_is_the_eldest() -> None:
    limits = make_limits(1000, block_tokens=1, best_effort_share=0.1)
    eldest = spare(decodes([1.0]))
    eldest["prompt_tokens"] = eldest["computed_tokens"] = 250
    assert form(eldest, prompts([900], [1.0]), limits=limits)[1] == [PREEMPT, 900]
