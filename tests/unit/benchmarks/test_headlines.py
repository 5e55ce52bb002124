"""The names in the headlines of the benchmarks, on made-up points: results are compared by them."""

import argparse
from typing import Any

import pytest

from benchmarks import (
    control_plane,
    decisions,
    e2e_overhead,
    front_path,
    length_bounds,
    main_job,
    perf_model,
    plug_in,
    programs,
    programs_live,
    retry,
)


def test_decisions() -> None:
    figures = dict.fromkeys(("decisions_per_s", "decisions_per_clock_s", "call_p50_ms", "call_p99_ms"), 2.0)
    figures |= dict.fromkeys(("decision_us", "python_share"), 2.0)
    fleets = [(32, 1), (100, 1), (100, 16), (256, 1)]
    points = [{"profile": "p", "replicas": n, "burst": burst, **figures} for n, burst in fleets]
    found = decisions.headline(points, "p", 1.0)
    assert set(found) >= {"decisions_per_s_100", "p99_ms_100", "decision_ms_burst16_100", "cost_ratio_256_vs_32"}


def test_perf_model() -> None:
    records = [
        {"form": "roofline", "grid": {"mape_pct": error}, "off_grid_mape_pct": 2 * error} for error in (1.0, 3.0)
    ]
    assert perf_model.headline(records) == {"mape_grid_worst": 3.0, "mape_offgrid_worst": 6.0}


def e2e_point(side: str, streams: int, ttft_ms: float, tokens_per_s: float) -> dict[str, Any]:
    hops = {"http_hop_ms_p50": 1.0, "inner_hops_ms_p50": 2.0} if side == e2e_overhead.STACK else {}
    return {"side": side, "streams": streams, "ttft_ms_p50": ttft_ms, "tokens_per_s": tokens_per_s, **hops}


def test_e2e_overhead() -> None:
    points = [e2e_point("server", 1, 10.0, 90.0), e2e_point("stack", 1, 14.0, 80.0)]
    points += [e2e_point("server", 64, 20.0, 4000.0), e2e_point("stack", 64, 30.0, 5000.0)]
    found = e2e_overhead.headline(points)
    assert found["added_ttft_ms_p50"] == 4.0
    assert found["tokens_per_s_ratio_64"] == 1.25
    assert found["sim_replicas16_tokens_per_s"] == 5000.0


def front_point(side: str, replicas: int, streams: int, tokens_per_s: float) -> dict[str, Any]:
    """A window in which the kinds of process of one side took 2 us a token."""
    spent = {"ingress": 2.0, "proxy": 1.0, "controller": 2.0} if side == "stack" else {"server": 4.0}
    point = {"side": side, "replicas": replicas, "streams": streams, "round": 0}
    return {**point, "cpu_us_per_token": spent, "ttft_ms_p50": 5.0, "tokens_per_s": tokens_per_s}


def test_front_path() -> None:
    """As a quick run gives them: the larger fleet at most streams only."""
    rates = {(2, 1): 10.0, (2, 64): 50.0, (2, 256): 80.0, (16, 256): 100.0}
    points = [front_point(side, *place, rate) for place, rate in rates.items() for side in ("server", "stack")]
    assert front_path.headline_of(points) == {
        "cpu_per_token_ratio_ingress": 0.5,
        "cpu_per_token_ratio_stack": 1.25,
        "tokens_per_s_ratio_saturated": 1.0,
        "added_ttft_ms_p50_1": 0.0,
        "added_ttft_ms_p50_64": 0.0,
        "tokens_per_s_16_over_2_replicas": 1.25,
    }
    two = [front_point(side, 2, 256, 40.0) | {"ingresses": 2} for side in ("server", "stack")]
    known = front_path.headline_of([point | {"ingresses": 1} for point in points])
    assert front_path.headline_of([point | {"ingresses": 1} for point in points] + two) == {
        **known,
        "tokens_per_s_2_over_1_ingresses": 0.5,
    }
    asked = argparse.Namespace(quick=True, streams=[1, 64, 256], replicas=[2, 16], ingresses=[1, 2])
    assert front_path.fleets_of(asked) == [(2, 1), (16, 1), (2, 2)]
    assert [front_path.streams_of(asked, replicas) for replicas in asked.replicas] == [[1, 64, 256], [256]]


def test_control_plane() -> None:
    names = ("requests_per_core_s", "decision_p99_ms", "longest_event_ms", "grown_mib")
    points = [{"replicas": n, **dict.fromkeys(names, value)} for n in (100, 1000) for value in (1.0, 2.0)]
    found = control_plane.headline(points)
    assert (found["requests_per_core_s_100"], found["requests_per_core_s_1000"]) == (1.0, 1.0)
    assert (found["decision_p99_ms_100"], found["longest_event_ms"]) == (2.0, 2.0)


def main_job_point(load: float, system: str, attained: float) -> dict[str, Any]:
    promised = {"promised": 100, "kept_share": 0.96} if system == "polyslo" else {"promised": 0, "kept_share": None}
    row = {"attainment": attained, "tokens_per_s": 100.0, **promised}
    return {"load": load, "system": system, "classes": [{"label": "all", **row}, {"label": "tight", **row}]}


def test_main_job() -> None:
    points = [main_job_point(load, *own) for load in (0.5, 1.5) for own in (("polyslo", 0.9), ("round-robin", 0.6))]
    assert main_job.headline(points) == {
        "kept_worst_load": 0.96,
        "attained_ratio_worst_tier": pytest.approx(1.5),
        "attained_ratio": pytest.approx(1.5),
        "tokens_per_s_ratio": 1.0,
    }


def test_main_job_finds_tiers_by_their_labels() -> None:
    """Classes come in the order of their first requests, which is another one with each seed."""
    shares = {"polyslo": {"tight": 0.2, "loose": 0.8}, "round-robin": {"tight": 0.1, "loose": 0.8}}
    points = [main_job_point(1.0, system, 0.5) for system in shares for _ in range(3)]
    for k, point in enumerate(points):
        row = point["classes"].pop()
        labels = ("tight", "loose") if k % 3 else ("loose", "tight")
        own = shares[point["system"]]
        point["classes"] += [{**row, "label": label, "attainment": own[label]} for label in labels]
        point["classes"].append({**row, "label": "free", "attainment": None, "promised": 0})
    assert main_job.headline(points)["attained_ratio_worst_tier"] == pytest.approx(1.0)
    for point in points:
        for row in point["classes"]:
            if (point["system"], row["label"]) == ("polyslo", "loose"):
                row["attainment"] = 0.0
    assert main_job.headline(points)["attained_ratio_worst_tier"] == 0.0, "a tier that nobody attains counts"


def live_point(system: str, load: float, seed: int, in_time: float) -> dict[str, Any]:
    return {"system": system, "load": load, "scale": 4.0, "seed": seed, "in_time": in_time}


def test_live_programs_are_compared_where_every_system_has_played() -> None:
    both = [live_point("polyslo", 2.0, 1, 0.6), live_point("vllm-affinity", 2.0, 1, 0.3)]
    alone = [live_point("vllm-affinity", 2.0, 2, 0.9), live_point("vllm-affinity", 3.0, 1, 0.1)]
    assert programs_live.headline(both + alone) == programs_live.headline(both)
    assert programs_live.headline(both)["programs_in_time_ratio"] == 2.0


def retry_point(overload: float, share: float | None) -> dict[str, Any]:
    rates = {"attained_per_s": 5.0, "attained_per_s_without_retries": 5.0}
    return {"overload": overload, "admitted_share": share, "retries": 9, "retries_at_cap": 1, **rates}


def test_retry() -> None:
    found = retry.headline_of([retry_point(1.2, 0.9), retry_point(1.5, 0.8), retry_point(1.5, None)])
    assert (found["retry_admitted_share_1_2"], found["retry_admitted_share_1_5"]) == (0.9, 0.8)
    assert "retry_admitted_share_1_5" not in retry.headline_of([retry_point(1.2, 0.9), retry_point(1.5, None)])


def test_programs_and_length_bounds() -> None:
    points = [{"graphs": n, "median_ms": 1.0, "p99_ms": 2.0} for n in programs.SIZES]
    assert programs.headline(points) == {"match_ms_500": 1.0, "match_ms_p99_500": 2.0}
    names = ("refresh_64", "refresh_64_p99", "single", "library_64", "batch_64", "grow_s")
    assert length_bounds.headline([dict.fromkeys(names, 3.0)])["ms_per_64"] == 3.0


def test_plug_in() -> None:
    points = [
        {"load": load, "system": system, "attained": 0.9, "bulk_tokens": 10.0}
        for load in (0.5, 1.5)
        for system in ("vllm", "plug-in")
    ]
    names = ("attained_vllm", "attained_plug_in", "bulk_tokens_ratio")
    assert set(plug_in.headline(points)) == {f"{name}_{load}" for name in names for load in ("0_5", "1_5")}
