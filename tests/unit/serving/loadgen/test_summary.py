"""The arithmetic of the report on hand-made records."""

import math
from array import array
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from serving.loadgen.client import Record, Status
from serving.loadgen.mix import SloClass
from serving.loadgen.stream import SloEcho
from serving.loadgen.summary import headline, summarize

CHAT = SloClass("chat", ttft_ms=500.0, tpot_ms=100.0)
BULK = SloClass("bulk", best_effort=True)
ECHO = SloEcho(
    admitted=True, replica="r0", predicted_ttft_ms=110.0, predicted_tpot_ms=40.0, ttft_ms=100.0, tpot_ms=50.0
)


def finished(
    first_s: float = 0.1, gap_s: float = 0.05, tokens: int = 11, due_s: float = 0.0, lag_s: float = 0.0
) -> Record:
    times_s = array("d", (due_s + first_s + gap_s * i for i in range(tokens)))
    return Record(
        request=0,
        due_s=due_s,
        sent_s=due_s + lag_s,
        status=Status.FINISHED,
        http_status=200,
        end_s=times_s[-1],
        chunk_s=times_s,
        chunk_tokens=array("l", [1] * tokens),
        slo=ECHO,
    )


def failed(status: Status, **changes: Any) -> Record:
    return replace(Record(0, 0.0, 0.0, status, end_s=1.0), **changes)


def test_refused_downgraded_failed_and_unfinished_are_misses() -> None:
    downgraded = replace(finished(), slo=SloEcho(admitted=False, reason="ttft_unattainable"))
    cut_short = replace(finished(), status=Status.UNFINISHED, end_s=math.nan)
    records = [finished(), finished(first_s=0.6), downgraded, cut_short]
    records += [failed(Status.REFUSED, retry_after_s=3.0, detail="kv"), failed(Status.ERROR, detail="HTTP 500: x")]
    whole, chat = summarize(records, [CHAT] * 6, elapsed_s=10.0)
    assert {k: v for k, v in whole.items() if k != "label"} == {k: v for k, v in chat.items() if k != "label"}
    assert (whole["requests"], whole["with_slo"], whole["attained"]) == (6, 6, 1)
    assert whole["attainment"] == pytest.approx(1 / 6)
    assert (whole["promised"], whole["kept_share"]) == (3, pytest.approx(1 / 3)), "one was late, one cut short"
    assert (whole["refused"], whole["error"], whole["unfinished"], whole["finished"]) == (1, 1, 1, 3)
    assert (whole["downgraded"], whole["downgraded_on_time"]) == (1, 1)
    assert whole["goodput_per_s"] == pytest.approx(0.1)
    assert whole["tokens_per_s"] == pytest.approx(4 * 11 / 10.0)
    assert whole["retry_after_s"] == {"count": 1, "min": 3.0, "mean": 3.0, "max": 3.0}
    assert whole["reasons"] == {"ttft_unattainable": 1, "kv": 1, "HTTP 500: x": 1}


def test_a_promise_that_a_dead_replica_broke_is_one_and_its_times_are_not_compared() -> None:
    moved = SloEcho(admitted=False, promised=True, predicted_ttft_ms=110.0, ttft_ms=9000.0, resumed=1)
    moved_in_time = msgspec.structs.replace(ECHO, promised=True, ttft_ms=450.0, resumed=1)
    unpromised = msgspec.structs.replace(ECHO, promised=False)
    records = [replace(finished(), slo=slo) for slo in (ECHO, moved_in_time, unpromised)]
    whole, _ = summarize([*records, replace(finished(first_s=9.0), slo=moved)], [CHAT] * 4, elapsed_s=5.0)
    assert (whole["promised"], whole["kept_share"]) == (3, pytest.approx(2 / 3))
    assert (whole["prediction"]["ttft"]["count"], whole["prediction"]["ttft"]["bias_ms"]) == (2, pytest.approx(10.0))


def test_a_promise_is_kept_where_every_token_came_in_time_whoever_served_it_in_the_end() -> None:
    """Its replica died, and the controller was away: what goes on elsewhere is admitted by nobody."""
    went_on = SloEcho(admitted=False, promised=True, met=True, predicted_ttft_ms=110.0, ttft_ms=450.0, resumed=1)
    whole, _ = summarize([replace(finished(), slo=went_on)], [CHAT], elapsed_s=5.0)
    assert (whole["promised"], whole["kept_share"]) == (1, 1.0)


def test_a_promise_told_at_the_beginning_of_an_answer_that_broke_off_is_a_broken_one() -> None:
    """Its verdict would have come at the end."""
    broken = replace(finished(), status=Status.ERROR, slo=None, is_promised=True)
    unpromised = replace(broken, is_promised=False)
    whole, _ = summarize([finished(), broken, unpromised], [CHAT] * 3, elapsed_s=5.0)
    assert (whole["promised"], whole["kept_share"]) == (2, pytest.approx(0.5))


def test_best_effort_requests_are_counted_but_not_judged() -> None:
    records = [finished(), finished(first_s=9.0), replace(finished(), slo=SloEcho(admitted=False))]
    whole, chat, bulk = summarize(records, [CHAT, BULK, BULK], elapsed_s=10.0)
    assert (whole["attainment"], whole["with_slo"], whole["requests"]) == (1.0, 1, 3)
    assert (chat["attainment"], bulk["attainment"], bulk["downgraded"]) == (1.0, None, 0)


def test_lateness_of_the_client_counts_but_is_told_apart() -> None:
    (whole, _) = summarize([finished(first_s=0.6, due_s=2.0, lag_s=0.2)], [CHAT], elapsed_s=5.0)
    assert (whole["attainment"], whole["attainment_from_send"]) == (0.0, 1.0)
    assert whole["send_lag_ms"]["p50"] == pytest.approx(200.0)
    assert whole["ttft_ms"]["p50"] == pytest.approx(600.0)


def test_tolerant_and_mean_variants_stand_beside_the_strict_one() -> None:
    late_once = finished(gap_s=0.1, first_s=0.5, tokens=200)
    late_once.chunk_s[100] += 0.05
    slow_but_early = finished(gap_s=0.11, tokens=20)
    whole, _ = summarize([late_once, slow_but_early], [CHAT, CHAT], elapsed_s=5.0)
    assert (whole["attainment"], whole["attainment_tolerant"], whole["attainment_mean_tpot"]) == (0.5, 1.0, 0.5)


def test_chunks_of_several_tokens_share_their_time() -> None:
    record = replace(finished(tokens=3), chunk_tokens=array("l", [1, 1, 4]))
    whole, _ = summarize([record], [CHAT], elapsed_s=1.0)
    assert whole["output_tokens"] == 6
    assert whole["tpot_ms"]["p50"] == pytest.approx(2 * 50.0 / 5)


def test_prediction_errors_are_the_servers_own_figures() -> None:
    refused_and_unpredicted = [failed(Status.REFUSED), replace(finished(), slo=SloEcho(admitted=True))]
    whole, _ = summarize([finished(), *refused_and_unpredicted], [CHAT] * 3, elapsed_s=1.0)
    ttft, tpot = whole["prediction"]["ttft"], whole["prediction"]["tpot"]
    assert (ttft["count"], ttft["mape_pct"], ttft["bias_ms"]) == (1, pytest.approx(10.0), pytest.approx(10.0))
    assert (tpot["count"], tpot["mape_pct"], tpot["bias_ms"]) == (1, pytest.approx(20.0), pytest.approx(-10.0))
    assert whole["replicas"] == {"r0": 1}


def test_headline_tells_the_worst_class_and_leaves_out_what_is_unknown() -> None:
    tight = SloClass("tight", ttft_ms=1.0)
    points = summarize([finished(), finished(), finished()], [CHAT, tight, BULK], elapsed_s=1.0)
    figures = headline(points)
    assert (figures["attainment_chat"], figures["attainment_tight"], figures["attainment_worst_class"]) == (
        1.0,
        0.0,
        0.0,
    )
    assert "attainment_bulk" not in figures
    assert all(isinstance(value, int | float) for value in figures.values())
    unjudged = headline(summarize([failed(Status.ERROR)], [BULK], elapsed_s=0.0))
    assert "attainment" not in unjudged
    assert "ttft_ms_p50" not in unjudged
    assert unjudged["goodput_per_s"] == 0.0


def test_no_records_at_all_is_an_empty_point() -> None:
    (whole,) = summarize([], [], elapsed_s=0.0)
    assert (whole["requests"], whole["attainment"], whole["ttft_ms"]["p50"]) == (0, None, None)


def test_a_slowdown_is_judged_by_what_the_verdict_says_it_amounts_to() -> None:
    scaled = SloClass("scaled", tier="scaled", ttft_slowdown=3.0)
    echoes = [replace_echo(target_ttft_ms) for target_ttft_ms in (90.0, 110.0, None)]
    records = [replace(finished(first_s=0.1), slo=echo) for echo in echoes]
    points = [summarize([record], [scaled], elapsed_s=1.0)[0] for record in records]
    assert [point["with_slo"] for point in points] == [1, 1, 1]
    assert [point["attained"] for point in points] == [0, 1, 1], "the last server tells nothing: no bound"


def replace_echo(target_ttft_ms: float | None) -> SloEcho:
    return SloEcho(admitted=True, replica="r0", target_ttft_ms=target_ttft_ms)


@pytest.mark.parametrize(("reason", "downgraded"), [("controller_away", 0), ("ttft_unattainable", 1)])
def test_what_nobody_decided_is_served_by_its_objective_and_no_downgrade(reason: str, downgraded: int) -> None:
    record = replace(finished(), slo=SloEcho(admitted=False, reason=reason))
    (whole, _) = summarize([record], [CHAT], elapsed_s=10.0)
    assert (whole["downgraded"], whole["attained"], whole["promised"]) == (downgraded, 1 - downgraded, 0)
