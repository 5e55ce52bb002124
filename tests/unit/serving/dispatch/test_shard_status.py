"""One page of those of several shards."""

import copy
import math
from typing import Any

from serving.dispatch.shard_status import merged_status


def tier(
    requests: int, met: int, promised: int, kept: int, recent: int, share: float | None, p50: float
) -> dict[str, Any]:
    window = {"requests": recent, "attainment": share, "kept_share": share, "ttft_ms": {"p50": p50}}
    counts = dict.fromkeys(("refused", "best_effort", "errors", "abandoned"), 1)
    told = {"requests": requests, "met": met, "promised": promised, "kept": kept, **counts}
    return told | {"attainment": met / requests if requests else None, "kept_share": 0.0, "window": window}


def page(shard: int, *names: str) -> dict[str, Any]:
    size = {"target": 2, "min_replicas": 1, "max_replicas": 4, "not_started": 1, "without_room": 0, "held_s": shard}
    change = {"what": f"shard {shard}", "before": "", "after": "", "reason": ""}
    return {
        "controller": {
            "incarnation": f"i{shard}",
            "code": "abc",
            "pid": shard,
            "uptime_s": 1.5,
            "decisions": 7,
            "given_up": 0,
            "decision_us_mean": 80.0,
        },
        "version": 3 + shard,
        "replicas": [{"replica": name, "live": name != "dead", "seconds_since_report": 0.1} for name in names],
        "starting": [{"replica": f"new-{shard}"}],
        "waiting": {"chat": 2} | ({"code": 1} if shard else {}),
        "best_effort_waiting": 5,
        "attainment": {"chat": tier(10 + 10 * shard, 10, 4, 4 - 2 * shard, 10 + 20 * shard, 1.0 - 0.4 * shard, shard)},
        "allocation": {
            "roles": "dynamic",
            "size": size | {"wanted": {"chat": 1 + shard}},
            "demand": {"chat": {"requests_per_s": 1.0 + shard, "prefill_tokens_per_s": 10.0}},
            "history": [change | {"age_s": 1.0 + shard}, change | {"age_s": 5.0 + shard}],
        },
    }


def both() -> dict[str, Any]:
    return merged_status({0: page(0, "b", "d"), 1: page(1, "a", "dead", "c")}, {0: 0.25, 1: math.inf})


def test_replicas_and_what_waits_are_pooled() -> None:
    merged = both()
    assert [replica["replica"] for replica in merged["replicas"]] == ["a", "b", "c", "d", "dead"]
    assert [start["replica"] for start in merged["starting"]] == ["new-0", "new-1"]
    assert merged["waiting"] == {"chat": 4, "code": 1}
    assert merged["best_effort_waiting"] == 10
    assert merged["version"] == 3, "the leader's, as anything else"


def test_a_replica_that_left_a_blocked_shard_is_there_once() -> None:
    blocked, other = page(0, "a", "b"), page(1, "c")
    moved = blocked["replicas"][0]
    other["replicas"].append(moved | {"seconds_since_report": 0.01, "tier": "here"})
    for pages in ({0: blocked, 1: other}, {0: other, 1: blocked}):
        first, *others = merged_status(pages, {})["replicas"]
        assert (first["replica"], first.get("tier"), len(others)) == ("a", "here", 2)


def test_attainment_is_that_of_all_requests() -> None:
    chat = both()["attainment"]["chat"]
    assert (chat["requests"], chat["met"], chat["attainment"]) == (30, 20, 20 / 30)
    assert (chat["promised"], chat["kept"], chat["kept_share"]) == (8, 6, 0.75)
    assert chat["refused"] == 2
    assert chat["window"]["requests"] == 40
    assert chat["window"]["attainment"] == (10 * 1.0 + 30 * 0.6) / 40
    assert chat["window"]["ttft_ms"] == {"p50": 1}, "of the shard with most requests in the window"


def test_a_tier_that_one_shard_knows_and_one_without_requests_are_told_as_they_are() -> None:
    pages = {0: page(0), 1: page(1)}
    pages[1]["attainment"] = {"code": tier(0, 0, 0, 0, 0, None, 0.0)}
    merged = merged_status(pages, {})["attainment"]
    assert merged["chat"]["requests"] == 10
    assert merged["code"]["attainment"] is None
    assert merged["code"]["window"]["attainment"] is None


def test_demand_and_sizes_are_summed_and_changes_are_in_order_of_time() -> None:
    allocation = both()["allocation"]
    assert allocation["demand"] == {"chat": {"requests_per_s": 3.0, "prefill_tokens_per_s": 20.0}}
    size = allocation["size"]
    assert (size["target"], size["min_replicas"], size["max_replicas"], size["not_started"]) == (4, 2, 8, 2)
    assert size["wanted"] == {"chat": 3}
    assert size["held_s"] == 0
    assert [(c["what"], c["age_s"]) for c in allocation["history"]] == [
        ("shard 0", 1.0),
        ("shard 1", 2.0),
        ("shard 0", 5.0),
        ("shard 1", 6.0),
    ]


def test_a_fleet_of_fixed_size_has_none_and_what_is_not_known_is_not_guessed() -> None:
    pages = {0: page(0), 1: page(1)}
    pages[0]["allocation"]["size"] = None
    pages[1]["allocation"]["size"]["target"] = None
    assert merged_status(pages, {})["allocation"]["size"]["target"] is None
    pages[1]["allocation"]["size"] = None
    assert merged_status(pages, {})["allocation"]["size"] is None


def test_programs_and_prefix_hits_are_those_of_all() -> None:
    """Each program is one shard's: the page told of the leader's alone."""
    counts = dict(open=2, waiting=1, known_graphs=5, on_time=3, late=1, failed=0, refused=2, promised=2, kept=1)
    pages = {0: page(0), 1: page(1), 2: page(2)}
    for place in (0, 1):
        pages[place]["programs"] = counts | {"on_time_share": 0.75, "kept_share": 0.5}
        pages[place]["prefixes"] = {"prompt_tokens": 100, "hit_tokens": 10 + 20 * place, "certain_tokens": 0}
    pages[1]["programs"] |= {"on_time": 0, "late": 4, "on_time_share": 0.0}
    merged = merged_status(pages, {})
    programs = merged["programs"]
    assert (programs["open"], programs["waiting"], programs["refused"], programs["known_graphs"]) == (4, 2, 4, 10)
    assert (programs["on_time_share"], programs["kept_share"]) == (3 / 8, 0.5)
    assert merged["prefixes"] == {"prompt_tokens": 200, "hit_tokens": 40, "certain_tokens": 0}


def test_an_alarm_of_any_shard_is_told_once() -> None:
    def drift(*since_s: float) -> dict[str, Any]:
        alarms = [{"tier": "chat", "figure": "ttft", "ratio": 2.0, "since_s": each} for each in since_s]
        return {"measured_over_predicted": {"chat": {"ttft": 1.0}}, "alarms": alarms}

    pages = {place: page(place) | {"drift": told} for place, told in enumerate((drift(), drift(5.0), drift(9.0)))}
    assert [alarm["since_s"] for alarm in merged_status(pages, {})["drift"]["alarms"]] == [9.0]


def test_an_error_of_any_shard_is_told() -> None:
    """Each trains its own lengths, and keeps checkpoints of its own."""
    kept: dict[str, Any] = {"uri": "/a", "problems": [], "error": ""}
    fine: dict[str, Any] = {"scaling_error": "", "lengths_error": "", "checkpoints": kept}
    bad = kept | {"problems": ["checkpoint 3: is damaged"], "error": "no space left"}
    failing = {"lengths_error": "MemoryError", "checkpoints": bad}
    merged = merged_status({0: page(0) | fine, 1: page(1) | fine | failing}, {})
    assert (merged["scaling_error"], merged["lengths_error"]) == ("", "MemoryError")
    assert merged["checkpoints"] == bad


def test_each_shard_has_a_line() -> None:
    first, second = both()["shards"]
    assert first == {
        "shard": 0,
        "answers": True,
        "incarnation": "i0",
        "code": "abc",
        "pid": 0,
        "uptime_s": 1.5,
        "decisions": 7,
        "given_up": 0,
        "decision_us_mean": 80.0,
        "replicas": 2,
        "live": 2,
        "load": 0.25,
    }
    assert (second["replicas"], second["live"], second["load"]) == (3, 2, None)


def test_without_the_leader_the_page_is_of_those_that_answer() -> None:
    merged = merged_status({0: None, 1: page(1, "a"), 2: page(2, "b")}, {})
    assert [replica["replica"] for replica in merged["replicas"]] == ["a", "b"]
    assert merged["version"] == 4
    assert merged["shards"][0] == {"shard": 0, "answers": False}


def test_a_shard_that_is_not_configured_yet_adds_what_it_has() -> None:
    newborn = {"controller": {"pid": 9}, "tiers": [], "replicas": [], "attainment": {}, "starting": []}
    merged = merged_status({0: page(0, "a"), 1: newborn}, {})
    assert [replica["replica"] for replica in merged["replicas"]] == ["a"]
    assert merged["allocation"]["size"]["target"] == 2


def test_a_leader_that_was_reborn_hides_nothing_that_another_shard_knows() -> None:
    """Until it was configured, the page had no tiers and no version."""
    newborn = {"controller": {"pid": 9}, "tiers": [], "replicas": [], "attainment": {}, "starting": []}
    merged = merged_status({0: newborn, 1: page(1, "a") | {"tiers": [{"name": "chat"}]}}, {})
    assert (merged["version"], merged["tiers"]) == (4, [{"name": "chat"}])
    assert merged["controller"] == {"pid": 9}


def test_pages_stay_as_they_were() -> None:
    pages = {0: page(0, "b"), 1: page(1, "a")}
    before = copy.deepcopy(pages)
    merged_status(pages, {})
    assert pages == before
