"""The replay end to end against a real HTTP server that streams, refuses, breaks off and hangs on request."""

import itertools
import json
import math
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from serving.cli import commands as cli
from serving.loadgen import replay
from serving.loadgen.client import Status
from serving.loadgen.mix import parse_mix
from serving.loadgen.replay import ReplayOptions
from simulation.workloads.traces import WorkloadError
from tests.support.replay_server import (
    TOKENS_PER_CHUNK,
    FakeServer,
    Handler,
    break_off,
    downgrade,
    fail_in_stream,
    fail_with_500,
    garble,
    hang,
    refuse,
    refuse_for_good,
    stream_all,
)
from tests.support.synthetic_trace import small_trace, synthetic_trace


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.release.set()
    fake.shutdown()
    fake.server_close()
    thread.join(10)
    assert not thread.is_alive()


GENEROUS = parse_mix([{"label": "chat", "ttft_ms": 60000, "tpot_ms": 60000}])


def test_whole_streams_attain_a_generous_slo(server: FakeServer) -> None:
    trace = small_trace()
    played = replay.replay(ReplayOptions(trace, server.url, slo_mix=GENEROUS))
    assert [r.status for r in played.records] == [Status.FINISHED] * 8
    assert [sum(r.chunk_tokens) for r in played.records] == trace.output_tokens.tolist()
    assert max(max(r.chunk_tokens) for r in played.records) == TOKENS_PER_CHUNK
    whole = played.points[0]
    assert (whole["attained"], whole["attainment"], whole["output_tokens"]) == (8, 1.0, trace.output_tokens.sum())
    assert whole["prediction"]["ttft"]["bias_ms"] == pytest.approx(2.0)


def test_requests_carry_exact_prompts_lengths_and_slos(server: FakeServer) -> None:
    trace = small_trace()
    replay.replay(ReplayOptions(trace, server.url, slo_mix=GENEROUS, vocabulary=(50, 60)))
    for number, (headers, body) in server.seen.items():
        assert len(body["prompt"]) == trace.input_tokens[number]
        assert set(body["prompt"]) <= set(range(50, 60))
        assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (trace.output_tokens[number], True, True)
        assert (headers["x-slo-ttft-ms"], headers["x-slo-tpot-ms"]) == ("60000", "60000")
        assert "x-slo-e2e-ms" not in headers


def test_who_is_refused_comes_back_when_told(server: FakeServer) -> None:
    """Of three refused ones, one is told 1 s and refused once more, one is told more than it waits for, one nothing."""

    def refuse_twice(handler: Handler) -> None:
        told = {"error": {"message": "no", "type": "rate_limit_error", "param": None, "code": "x"}}
        if server.seen_again[handler.request_number] < 2:
            server.seen_again[handler.request_number] += 1
            handler.reply(429, told, retry_after="1", x_slo_reason="ttft_unattainable")
        else:
            stream_all(handler)

    server.script = {0: refuse_twice, 1: refuse, 2: refuse_for_good}
    played = replay.replay(ReplayOptions(small_trace(3), server.url, slo_mix=GENEROUS, return_within_s=2.0))
    by_request = {n: [r for r in played.records if r.request == n] for n in range(3)}
    assert [r.status for r in by_request[0]] == [Status.REFUSED, Status.REFUSED, Status.FINISHED]
    assert [r.returns for r in by_request[0]] == [0, 1, 2]
    assert [r.status for r in by_request[1] + by_request[2]] == [Status.REFUSED] * 2
    for earlier, later in itertools.pairwise(by_request[0]):
        assert later.due_s == pytest.approx(earlier.end_s + 1.0)
        assert later.sent_s > later.due_s - 0.01  # timers of loops are whole milliseconds
    assert len(played.asked) == 5


def test_the_same_seed_sends_the_same_requests(server: FakeServer) -> None:
    def bodies(seed: int) -> list[Any]:
        replay.replay(ReplayOptions(small_trace(), server.url, slo_mix=GENEROUS, seed=seed))
        return [body["prompt"] for _, (_, body) in sorted(server.seen.items())]

    assert bodies(1) == bodies(1) != bodies(2)


def test_every_way_to_fail_is_a_miss_of_its_own_kind(server: FakeServer) -> None:
    server.script = {0: refuse, 1: fail_with_500, 2: fail_in_stream, 3: break_off, 4: downgrade, 5: hang, 6: garble}
    played = replay.replay(ReplayOptions(small_trace(), server.url, slo_mix=GENEROUS, grace_s=2.0))
    status = {r.request: r.status for r in played.records}
    others = dict.fromkeys((1, 2, 3, 6), Status.ERROR) | dict.fromkeys((4, 7), Status.FINISHED)
    assert status == {0: Status.REFUSED, 5: Status.UNFINISHED} | others
    detail = {r.request: r.detail for r in played.records}
    assert [detail[k] for k in range(3)] == ["ttft_unattainable", "HTTP 500: engine is dead", "replica lost"]
    assert (detail[6][:9], "broke off" in detail[3] or "ClientPayloadError" in detail[3]) == ("HTTP 502:", True)
    whole, given_up_s = played.points[0], max(r.end_s for r in played.records)
    assert played.config["elapsed_s"] < given_up_s, "no response came in the time of grace"
    assert [whole[name] for name in ("attained", "attainment", "downgraded", "downgraded_on_time")] == [1, 1 / 8, 1, 1]
    assert (whole["promised"], whole["kept_share"]) == (4, 1 / 4), "of two streams that broke off and one that hung"
    assert whole["retry_after_s"] == {"count": 1, "min": 7.0, "mean": 7.0, "max": 7.0}


def test_due_times_follow_the_trace_whatever_the_answers(server: FakeServer) -> None:
    server.script = {0: hang}
    trace = small_trace(50)
    played = replay.replay(ReplayOptions(trace, server.url, rate_scale=2.0, grace_s=0.1))
    assert len(played.records) == 50
    assert [r.due_s for r in played.records] == pytest.approx((trace.arrival_s / 2.0).tolist())
    assert all(r.sent_s >= r.due_s - 5e-3 for r in played.records), "early by more than a timer tick"


def test_a_concurrency_limit_shows_as_late_sends(server: FakeServer) -> None:
    played = replay.replay(ReplayOptions(small_trace(20), server.url, concurrency_limit=1, slo_mix=GENEROUS))
    ends = [r.end_s for r in played.records]
    assert all(later.sent_s >= end for later, end in zip(played.records[1:], ends, strict=False))
    assert played.points[0]["finished"] == 20


def test_who_waits_to_return_is_not_in_flight(server: FakeServer) -> None:
    def refuse_once(handler: Handler) -> None:
        server.script = {}
        handler.reply(429, {"error": {"message": "no"}}, retry_after="1", x_slo_reason="ttft_unattainable")

    server.script = {0: refuse_once}
    played = replay.replay(ReplayOptions(small_trace(3), server.url, concurrency_limit=1, return_within_s=2.0))
    assert [(r.request, r.returns) for r in played.records] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert [r.status for r in played.records] == [Status.REFUSED] + 3 * [Status.FINISHED]


def test_a_server_with_keys_is_told_it(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "sk-7"
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(WorkloadError, match="HTTP 401"):
        replay.replay(ReplayOptions(small_trace(2), server.url, slo_mix=GENEROUS))
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    played = replay.replay(ReplayOptions(small_trace(2), server.url, slo_mix=GENEROUS))
    assert [r.status for r in played.records] == [Status.FINISHED] * 2
    assert server.key not in json.dumps(played.to_json())


def test_tier_classes_are_judged_by_the_servers_figures(server: FakeServer) -> None:
    mix = parse_mix([{"tier": "chat", "app": "synthetic"}, {"tier": "batch", "weight": 0.2}])
    played = replay.replay(ReplayOptions(small_trace(30), server.url, slo_mix=mix))
    by_label = {point["label"]: point for point in played.points}
    assert by_label["chat"]["attainment"] == 1.0
    assert by_label["batch"]["attainment"] is None
    assert {headers["x-slo-tier"] for headers, _ in server.seen.values()} == {"chat", "batch"}


def test_without_a_mix_the_servers_default_tier_is_judged(server: FakeServer) -> None:
    played = replay.replay(ReplayOptions(small_trace(), server.url))
    assert [point["label"] for point in played.points] == ["all", "chat"]
    assert played.points[1]["attainment"] == 1.0


def test_a_plain_server_without_a_status_page_is_not_judged(server: FakeServer) -> None:
    del server.pages["/polyslo/status"]
    played = replay.replay(ReplayOptions(small_trace(), server.url))
    assert [(point["label"], point["attainment"]) for point in played.points] == [("all", None), ("no-slo", None)]
    assert not any(name.startswith("x-slo") for headers, _ in server.seen.values() for name in headers)


def test_an_unknown_tier_is_named_before_anything_is_sent(server: FakeServer) -> None:
    with pytest.raises(WorkloadError, match=r"tier 'fast' is not a tier of http.* \(it has batch, chat\)"):
        replay.replay(ReplayOptions(small_trace(), server.url, slo_mix=parse_mix([{"tier": "fast"}])))
    assert not server.seen


def test_long_requests_are_cut_to_the_model(server: FakeServer) -> None:
    trace = synthetic_trace(20, 400.0, input_tokens=200, output_tokens=80)
    played = replay.replay(ReplayOptions(trace, server.url))
    lengths = [len(body["prompt"]) + body["max_tokens"] for _, body in server.seen.values()]
    assert max(lengths) <= 128
    assert played.config["cut_requests"] == np.count_nonzero(trace.input_tokens + trace.output_tokens > 128) > 0


def test_unknown_model_and_missing_server_are_clear(server: FakeServer) -> None:
    with pytest.raises(WorkloadError, match=r"--model big: not served .*it has tiny"):
        replay.replay(ReplayOptions(small_trace(), server.url, model="big"))
    with pytest.raises(WorkloadError, match="--url: cannot reach"):
        replay.replay(ReplayOptions(small_trace(), "http://127.0.0.1:1"))
    for told, encoding, message in (({"data": [3]}, "utf-8", "serves no model"), ("é", "latin-1", "not answer JSON")):
        server.pages["/v1/models"], server.encoding = told, encoding
        with pytest.raises(WorkloadError, match=message):
            replay.replay(ReplayOptions(small_trace(), server.url))
    server.pages = {}
    with pytest.raises(WorkloadError, match="answered HTTP 404"):
        replay.replay(ReplayOptions(small_trace(), server.url))


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("rate_scale", 0.0, "--rate-scale"),
        ("length_scale", math.nan, "--length-scale"),
        ("duration_s", math.inf, "--duration"),
        ("max_requests", -1, "--max-requests"),
        ("poisson_per_s", -2.0, "--poisson"),
        ("vocabulary", (5, 5), "--vocab"),
        ("grace_s", math.nan, "--grace"),
    ],
)
def test_senseless_options_are_named(name: str, value: Any, option: str) -> None:
    with pytest.raises(WorkloadError, match=option):
        ReplayOptions(small_trace(), **{name: value})


def write_csv(path: Path, requests: int = 6) -> Path:
    rows = "\n".join(f"{0.01 * row},12,8,app" for row in range(requests))
    path.write_text(f"arrival_s,input_tokens,output_tokens,app\n{rows}\n")
    return path


def test_command_prints_a_report_and_writes_files(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mix = tmp_path / "mix.yaml"
    mix.write_text("- {label: chat, ttft_ms: 60000, tpot_ms: 60000}\n- {label: bulk, best_effort: true}\n")
    out, records = tmp_path / "out.json", tmp_path / "records.parquet"
    options = ["--url", server.url, "--slo-mix", str(mix), "--seed", "5", "--json", str(out), "--records", str(records)]
    server.script = {0: refuse}
    assert cli.main(["replay", str(write_csv(tmp_path / "trace.csv", 20)), *options]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"chat +\d+ +\d+ +\d+\.\d ", printed)
    assert "Retry-After on 1 of 1 refusals" in printed
    result = json.loads(out.read_text())
    assert set(result) == {"name", "version", "config", "seeds", "machine", "headline", "points"}
    assert (result["seeds"], result["config"]["trace"]) == ([5], "trace")
    assert result["points"][0]["label"] == "all"
    assert result["headline"]["requests"] == 20
    rows = pyarrow.parquet.read_table(records).to_pylist()
    assert sum(row["attained"] for row in rows) == result["points"][0]["attained"]
    assert {row["status"] for row in rows} == {"finished", "refused"}


def test_interrupt_reports_what_was_seen(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(handler: Handler) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        hang(handler)

    server.script = {1: interrupt}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    trace = write_csv(tmp_path / "trace.csv", requests=40)
    status = cli.main(["replay", str(trace), "--url", server.url, "--rate-scale", "0.1"])
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert (status, "Interrupted" in capsys.readouterr().out) == (130, True)
    assert {0, 1} <= set(server.seen) < set(range(40))


def test_all_errors_is_a_failure(server: FakeServer, tmp_path: Path) -> None:
    server.script = dict.fromkeys(range(6), fail_with_500)
    assert cli.main(["replay", str(write_csv(tmp_path / "trace.csv")), "--url", server.url]) == 1


def refuse_for_now(handler: Handler) -> None:
    error = {"message": "no", "type": "rate_limit_error", "param": None, "code": "slo_unattainable"}
    handler.reply(429, {"error": error}, retry_after="0")


@pytest.mark.parametrize("return_within_s", [0.0, 2.0])
def test_nobody_returns_at_once_for_ever(server: FakeServer, return_within_s: float) -> None:
    """As other servers' refusals may ask for."""
    server.script = {0: refuse_for_now}
    played = replay.replay(
        ReplayOptions(small_trace(1), server.url, slo_mix=GENEROUS, return_within_s=return_within_s, grace_s=1.0)
    )
    assert [record.status for record in played.records] == [Status.REFUSED]


def test_a_time_without_end_is_refused_before_anything_is_sent() -> None:
    """No result file could hold it."""
    with pytest.raises(WorkloadError, match="--grace: must be from 0 and finite"):
        ReplayOptions(small_trace(1), grace_s=math.inf)
    with pytest.raises(WorkloadError, match="--return-within: must be from 0 and finite"):
        ReplayOptions(small_trace(1), return_within_s=math.inf)
