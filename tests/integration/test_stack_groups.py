"""A fleet of two kinds of GPUs (simulated engines), each a group with its own profile; its forests and checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import plain_http
from tests.support.stack import Stack, kill_9, running, texts, until

pytestmark = pytest.mark.integration

ARGS: dict[str, Any] = {
    "model": "embedded",
    "engine": {"kind": "simulated", "num_cpus": 0.1, "max_num_batched_tokens": 8192},
    "groups": [
        {"name": "h100", "profile": "h100_sxm__llama-3.1-8b"},
        {"name": "a100", "profile": "a100_sxm__llama-3.1-8b", "engine": {"max_num_seqs": 32}},
    ],
    "fleet": {"stall_timeout_s": 6.0},
    "lengths": {"estimator": "forest", "train_every": 20, "kv_room": "pooled"},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    checkpoints = {"uri": str(tmp_path_factory.mktemp("checkpoints")), "period_s": 1.0}
    with running(ARGS | {"checkpoints": checkpoints}) as up:
        yield up


def test_each_kind_is_mirrored_with_its_own_profile(stack: Stack) -> None:
    until(lambda: len(stack.live()) == 2)
    profiles = {replica["replica"].partition("/")[0]: replica["profile"] for replica in stack.live()}
    assert profiles == {"h100": "h100_sxm__llama-3.1-8b", "a100": "a100_sxm__llama-3.1-8b"}


def test_streams_of_a_dead_group_continue_in_the_other(stack: Stack) -> None:
    """What one kind of GPU began, the other finishes with the same tokens."""
    prompts = [f"story number {i}" for i in range(8)]
    undisturbed = texts(stack.client, prompts, 800)  # long enough to be struck in the middle on a busy machine
    until(lambda: len(stack.live()) == 2)
    victim: list[str] = []

    def disturb() -> None:
        until(lambda: any(replica["requests"] for replica in stack.live()))  # the page is kept for most of a second
        busiest = max(stack.live(), key=lambda replica: replica["requests"])
        victim.append(busiest["replica"])
        kill_9(busiest["pid"])

    assert texts(stack.client, prompts, 800, disturb) == undisturbed
    kind = victim[0].partition("/")[0]
    until(lambda: any(r["replica"].startswith(f"{kind}/") and r["replica"] not in victim for r in stack.live()), 90)


def ask(stack: Stack, tokens: int, app: str) -> dict[str, Any]:
    body = {"model": "embedded", "prompt": "hi", "max_tokens": tokens, "slo": {"app": app, "output_tokens": tokens}}
    answer = plain_http.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_forest_grows_beside_the_controller_and_outlives_it(stack: Stack) -> None:
    for position in range(70):
        ask(stack, 4 + position % 8, "short" if position % 2 else "long")
    until(lambda: stack.status()["lengths"]["version"] >= 1, 60)
    until(lambda: stack.status()["lengths"]["arrival"]["answers"] >= 70, 10)  # a page may be older than the last one
    before = stack.status()
    assert before["lengths_error"] == ""
    saved = before["checkpoints"]["saved"]
    until(lambda: stack.status()["checkpoints"]["saved"] > saved + 1, 60)
    kill_9(before["controller"]["pid"])
    until(lambda: stack.status()["controller"]["incarnation"] != before["controller"]["incarnation"], 60)
    until(lambda: stack.status()["checkpoints"]["saved"] > saved + 2, 60)
    after = stack.status()
    assert (after["checkpoints"]["problems"], after["checkpoints"]["error"]) == ([], "")
    assert after["checkpoints"]["restored"] > saved
    assert after["lengths"]["version"] >= before["lengths"]["version"]
    assert after["lengths"]["window"] >= 60
    assert ask(stack, 5, "short")["slo"]["admitted"] is True


def test_metrics_tell_coverage_and_drift(stack: Stack) -> None:
    ask(stack, 5, "short")
    until(lambda: "polyslo_length_bound_coverage{" in plain_http.get(f"{stack.url}/metrics", timeout=10).text, 30)
    text = plain_http.get(f"{stack.url}/metrics", timeout=10).text
    for name in ("length_bound_width", "length_forest_version", "drift_alarms"):
        assert f"polyslo_{name}" in text


def test_a_bad_hint_is_a_400_that_names_the_field(stack: Stack) -> None:
    body = {"model": "embedded", "prompt": "hi", "max_tokens": 4, "slo": {"output_tokens": -3}}
    answer = plain_http.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "slo.output_tokens"


def test_files_are_parquet_of_this_application(stack: Stack) -> None:
    root = Path(stack.document["applications"][0]["args"]["checkpoints"]["uri"])
    assert [path.name for path in root.iterdir()] == ["polyslo"]
    assert {path.suffix for path in root.rglob("*") if path.is_file()} <= {".parquet", ".partial"}
