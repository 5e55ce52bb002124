"""What replicas tell of their prefix caches shortens prompts in the forecasts that promises rest on."""

from typing import Any

import msgspec
import numpy as np
import pytest

from controller.fleet import Fleet
from controller.status import fleet_status
from protocol.messages import Report, Slo, Verdict
from protocol.prefixes import EVERYTHING, PrefixNews, packed_marks
from routing.prefix_index import hash_spacing
from tests.support.fleet_cases import TIGHT, ask, ended, fleet, report

PROMPT_TOKENS = 8000
SPACING = hash_spacing(PROMPT_TOKENS, 32)
MARKS = tuple(range(1, PROMPT_TOKENS // SPACING + 1))
WHOLE = len(MARKS) * SPACING


def told(name: str, sequence: int, stored: bytes = b"", removed: bytes = b"", **more: Any) -> Report:
    since = EVERYTHING if sequence == 1 else sequence - 1
    return report(name, sequence, prefixes=PrefixNews(since, stored, removed), **more)


def knowing(held: str = "a", names: str = "ab", **options: Any) -> Fleet:
    """Replicas of which ``held`` tells that it holds the prompt."""
    made = fleet(prefix_affinity=1.0, block_tokens=32, **options)
    for name in names:
        made.report(told(name, 1), 0.0)
        made.report(told(name, 2, packed_marks(MARKS) if name == held else b""), 0.0)
    return made


def test_a_prompt_that_is_held_is_promised_what_no_idle_replica_could() -> None:
    hasty = Slo(0.12, 0.05, tier="tight")
    for held, verdict in (("a", Verdict.ADMITTED), ("b", Verdict.ADMITTED), ("", Verdict.BEST_EFFORT)):
        (decision,) = knowing(held).admit([ask(hasty, PROMPT_TOKENS, prefix=MARKS)], 0.0)
        assert (decision.verdict, decision.replica) == (verdict, held or decision.replica)
    shorter = ask(hasty, PROMPT_TOKENS - WHOLE + 1)
    (same,) = knowing().admit([shorter], 0.0)
    (decision,) = knowing().admit([ask(hasty, PROMPT_TOKENS, prefix=MARKS)], 0.0)
    assert decision.predicted_ttft_s == pytest.approx(same.predicted_ttft_s, rel=0.3), "as if only the rest were asked"


def test_its_row_says_how_much_is_computed_and_needs_the_whole_kv_cache() -> None:
    made = knowing()
    (decision,) = made.admit([ask(TIGHT, PROMPT_TOKENS, prefix=MARKS)], 0.0)
    (row,) = made.replicas[decision.replica].table
    assert (decision.replica, int(row["computed_tokens"])) == ("a", WHOLE)
    assert made.replicas["a"].state["peak_tokens"][0] >= PROMPT_TOKENS
    assert not row["running"]
    assert fleet_status(made, 0.0)["prefixes"] == dict(prompt_tokens=8000, hit_tokens=WHOLE, certain_tokens=WHOLE)


def test_one_that_waits_is_not_begun_and_may_lose_its_place() -> None:
    made = knowing(names="a", pending=True)
    made.admit([ask(TIGHT, PROMPT_TOKENS, prefix=MARKS)], 0.0, "ingress")
    assert made.held.sent or made.held.pending
    asked = [p.request.request_id for p in (*made.held.sent.values(), *made.held.pending.values())]
    made.report(told("a", 3), 0.1)
    assert [p.request.request_id for p in (*made.held.sent.values(), *made.held.pending.values())] == asked


def test_what_has_gone_counts_no_more() -> None:
    made = knowing(names="a")
    made.report(told("a", 3, removed=packed_marks(MARKS[4:])), 0.1)
    made.admit([ask(TIGHT, PROMPT_TOKENS, prefix=MARKS)], 0.1)
    assert int(made.replicas["a"].table["computed_tokens"][0]) == 4 * SPACING
    assert made.replicas["a"].prefixes.hits(MARKS) == len(MARKS), "it is given the rest now"


def test_a_hit_that_may_be_evicted_before_is_not_counted() -> None:
    """400,000 tokens of KV cache: what others need until their ends, and what was given up since, must fit beside."""
    for others, expected in ((5, WHOLE), (6, 0)):
        made = knowing(names="a")
        for _ in range(others):
            filler = ask(Slo(tier="flex", best_effort=True), 78_000)
            made.admit([filler], 0.0)
            made.replicas["a"].table["running"] = True
            made.on_outcome(ended(filler, "stop", 100), 0.0)
        made.admit([ask(TIGHT, PROMPT_TOKENS, prefix=MARKS)], 0.0)
        assert int(made.replicas["a"].table["computed_tokens"][0]) == expected
    made = knowing(names="a")
    made.admit([ask(Slo(tier="flex", best_effort=True), 395_000)], 0.0)
    made.admit([ask(Slo(60.0, 1.0, tier="tight"), PROMPT_TOKENS, prefix=MARKS)], 0.0)
    assert not made.replicas["a"].table["computed_tokens"].any()


def test_one_token_is_left_to_compute_and_where_it_speculates_a_block() -> None:
    for drafts, expected in ((0, WHOLE - 32), (2, WHOLE - 64)):
        made = knowing(names="a")
        made.report(told("a", 3, drafts=drafts, acceptance=0.5), 0.0)
        made.admit([ask(TIGHT, WHOLE, prefix=MARKS)], 0.0)
        assert int(made.replicas["a"].table["computed_tokens"][0]) == expected


def test_a_burst_on_two_replicas_counts_what_each_of_them_holds() -> None:
    made, hasty = knowing(), Slo(0.12, 0.05, tier="tight")
    batch = [ask(hasty, PROMPT_TOKENS, prefix=MARKS), ask(hasty, PROMPT_TOKENS), ask(hasty, 300)]
    decisions = made.admit(batch, 0.0)
    assert [d.verdict for d in decisions] == [Verdict.ADMITTED, Verdict.BEST_EFFORT, Verdict.ADMITTED]
    assert decisions[0].replica == "a"
    made.check_integrity()


def test_a_kv_cache_that_was_transferred_is_no_hit() -> None:
    made = knowing(names="a")
    made.admit([ask(TIGHT, PROMPT_TOKENS, prefix=MARKS, emitted_tokens=1, transferred_kv_tokens=8000)], 0.0)
    assert int(made.replicas["a"].table["computed_tokens"][0]) == PROMPT_TOKENS


def test_a_controller_that_does_not_know_what_news_go_on_from_asks_for_everything() -> None:
    made = fleet(prefix_affinity=1.0, block_tokens=32)
    assert not made.report(told("a", 5, packed_marks(MARKS)), 0.0)
    everything = msgspec.structs.replace(told("a", 6), prefixes=PrefixNews(EVERYTHING, packed_marks(MARKS)))
    assert made.report(everything, 0.1)
    made.admit([ask(TIGHT, PROMPT_TOKENS, prefix=MARKS)], 0.1)
    made.admit([ask(TIGHT, PROMPT_TOKENS, prefix=MARKS)], 0.1)
    assert made.replicas["a"].table["computed_tokens"].tolist() == [0, WHOLE], "certain once it has been used again"


def test_an_adapter_that_is_held_is_no_part_of_the_prompt() -> None:
    """Both count as presumed tokens, so with an adapter nothing is known of the prompt alone."""
    affinity, held = knowing().affinity, np.array([100.0, 0.0])
    asked = ask(TIGHT, PROMPT_TOKENS, prefix=MARKS)
    assert affinity.held_prompt(asked, held) is held
    assert not len(affinity.held_prompt(msgspec.structs.replace(asked, adapter="lora"), held))


def test_lmetric_counts_what_is_held_as_computed_whatever_affinity_weighs() -> None:
    """The replica that holds the prompt is wanted until so many requests are there that a new prompt costs less."""
    given = []
    for weight in (1e-3, 1e9):
        made = fleet(routing="lmetric", prefix_affinity=weight, block_tokens=32)
        for name in "ab":
            made.report(told(name, 1), 0.0)
            made.report(told(name, 2, packed_marks(MARKS) if name == "a" else b""), 0.0)
        asked = [ask(TIGHT, PROMPT_TOKENS, prefix=MARKS) for _ in range(40)]
        given.append([made.admit([each], 0.0)[0].replica for each in asked])
    assert given[0] == given[1]
    assert given[0][:3] == ["a"] * 3
    assert "b" in given[0]
