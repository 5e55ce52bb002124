"""The fleet on the real stack with simulated engines: roles and tiers change under streams, its size follows load."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from serving.cli import commands as cli
from serving.launch.dashboard import serve_client
from tests.support import plain_http
from tests.support.stack import Stack, running, texts, until

pytestmark = pytest.mark.integration

TIERS = [
    {"name": "interactive", "ttft_ms": 1500, "tpot_ms": 40, "min_replicas": 1},
    {"name": "standard", "ttft_ms": 8000, "tpot_ms": 150, "min_replicas": 1, "max_replicas": 2},
    {"name": "batch", "best_effort": True},
]
ARGS = {
    "model": "embedded",
    "engine": {"kind": "simulated", "num_cpus": 0.1, "max_num_seqs": 64},
    "profile": "h100_sxm__llama-3.1-8b",
    "fleet": {
        "num_replicas": 3,
        "stall_timeout_s": 6.0,
        "role_idle_s": 1.0,
        "autoscaling": {
            "min_replicas": 3,
            "max_replicas": 5,
            "target_utilization": 0.2,  # little HTTP traffic is to be much load
            "look_back_period_s": 4.0,
            "upscale_cooldown_s": 2.0,
            "downscale_cooldown_s": 1.0,
            "downscale_delay_s": 4.0,
            "manual_hold_s": 45.0,  # longer than a replica takes to start
        },
    },
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(ARGS, tiers=TIERS, external_scaler_enabled=True) as up:
        yield up


def roles(stack: Stack) -> list[str]:
    return sorted(replica["role"] for replica in stack.live())


def size(stack: Stack) -> dict[str, Any]:
    return stack.status()["allocation"]["size"]


def history(stack: Stack) -> list[dict[str, Any]]:
    return stack.status()["allocation"]["history"]


def post(stack: Stack, tier: str, tokens: int = 4, prompt: Any = "hi") -> httpx.Response:
    body = {"model": "embedded", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return plain_http.post(f"{stack.url}/v1/completions", json=body, headers={"x-slo-tier": tier}, timeout=60)


def changed(name: str, **settings: Any) -> list[dict[str, Any]]:
    return [{**tier, **settings} if tier["name"] == name else tier for tier in TIERS]


def set_tiers(stack: Stack, tiers: list[dict[str, Any]]) -> Callable[[], None]:
    def redeploy() -> None:
        version = stack.status()["version"] + 1
        stack.deploy(stack.retiered(tiers, version))
        until(lambda: stack.status()["version"] == version)

    return redeploy


def test_every_tier_has_its_minimum_and_the_rest_is_the_pool(stack: Stack) -> None:
    until(lambda: roles(stack) == ["interactive", "pool", "standard"])
    assert stack.status()["allocation"]["roles"] == "dynamic"


def test_tiers_are_resized_under_running_streams_and_no_token_is_lost(stack: Stack) -> None:
    prompts = [f"prompt {i}" for i in range(8)]
    undisturbed = texts(stack.client, prompts, 300)
    pids = sorted(replica["pid"] for replica in stack.live())
    served = texts(stack.client, prompts, 300, set_tiers(stack, changed("interactive", min_replicas=2)))
    assert served == undisturbed
    until(lambda: roles(stack).count("interactive") == 2)
    assert sorted(replica["pid"] for replica in stack.live()) == pids, "no process was replaced"
    assert any(change["what"] == "tier interactive" for change in history(stack))
    set_tiers(stack, TIERS)()
    until(lambda: roles(stack) == ["interactive", "pool", "standard"])


def test_requests_of_a_removed_tier_move_to_the_next_tighter_one(stack: Stack) -> None:
    prompts = [f"story {i}" for i in range(4)]
    undisturbed = texts(stack.client, prompts, 400)
    kept = [{"name": "interactive", "ttft_ms": 1500, "tpot_ms": 40, "min_replicas": 1}, TIERS[2]]

    def remove() -> None:
        document = stack.retiered(kept, stack.status()["version"] + 1)
        document["applications"][0]["deployments"][0]["user_config"]["default_tier"] = "interactive"
        stack.deploy(document)
        until(lambda: [tier["name"] for tier in stack.status()["tiers"]] == ["interactive", "batch"])
        until(lambda: "standard" not in roles(stack))

    assert texts(stack.client, prompts, 400, remove) == undisturbed
    assert any("was removed" in change["reason"] for change in history(stack))
    assert post(stack, "standard").status_code == 400, "a client is told that there is no such tier"
    document = stack.retiered(TIERS, stack.status()["version"] + 1)
    document["applications"][0]["deployments"][0]["user_config"]["default_tier"] = "standard"
    stack.deploy(document)
    until(lambda: roles(stack) == ["interactive", "pool", "standard"])


def test_one_tier_is_changed_from_the_command_line(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--url", stack.url, "--address", stack.address]
    assert cli.main(["tiers", "set", "standard", "max_replicas=1", *places]) == 0
    assert cli.main(["tiers", "--url", stack.url]) == 0
    told = capsys.readouterr().out
    assert "is in force" in told
    row = next(line.split() for line in told.splitlines() if line.strip().startswith("standard"))
    assert row[5:8] == ["1", "1", "1"], "replicas, minimum, maximum"
    assert cli.main(["tiers", "set", "standard", "max_replicas=no", *places]) == 2
    assert "tiers.1.max_replicas" in capsys.readouterr().err
    assert cli.main(["tiers", "set", "standard", "min_replicas=9", "max_replicas=9", *places]) == 2
    assert "the fleet has at most 5" in capsys.readouterr().err
    assert cli.main(["fleet", "--url", stack.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["roles"] == "dynamic"
    set_tiers(stack, TIERS)()


def load(stack: Stack, stop: threading.Event, answers: list[int]) -> list[threading.Thread]:
    """Clients that ask one after the other, more than three replicas should do."""

    def ask() -> None:
        while not stop.is_set():
            answers.append(post(stack, "interactive", 20, [70] * 3500).status_code)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    return threads


def test_the_fleet_grows_with_the_load_and_the_drained_replica_is_the_one_removed(stack: Stack) -> None:
    stop, answers, seen, began_s = threading.Event(), list[int](), set[str](), time.monotonic()

    def watch() -> set[str]:
        live = {replica["replica"] for replica in stack.live()}
        seen.update(live)
        return live

    threads = load(stack, stop, answers)
    try:
        until(lambda: size(stack)["target"] > 3, 60)
        until(lambda: len(watch()) > 3, 90)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert answers.count(200) == len(answers) > 0, "nothing was lost on the way"
    ended_s = time.monotonic()

    def draining(since_s: float) -> set[str]:
        age_s = time.monotonic() - since_s
        return {each["what"] for each in history(stack) if each["after"] == "draining" and each["age_s"] < age_s}

    until(lambda: bool(watch() and draining(ended_s)), 120)  # none drains before all asked for have started
    before = set(seen)
    until(lambda: size(stack)["target"] == 3, 120)
    until(lambda: len(watch()) == 3, 60)
    left = watch()
    assert len(before) > 3
    assert before - left <= draining(began_s), "only what was drained has left"
    assert left <= before, "no successor was started in its place"


def test_a_size_set_by_hand_is_kept_for_a_while(stack: Stack) -> None:
    until(lambda: size(stack)["target"] == 3 and len(stack.live()) == 3, 120)
    path, wanted = "/api/v1/applications/polyslo/deployments/Replica/scale", {"target_num_replicas": 4}
    answer = serve_client(stack.address)._do_request("POST", path, json_data=wanted)  # with Ray's token
    assert answer.status_code == 200
    until(lambda: size(stack)["held_s"] > 0.0, 30)
    held_s, since_s = size(stack)["held_s"], time.monotonic()
    until(lambda: len(stack.live()) == 4, 90)
    assert any(change["reason"].startswith("set by hand") for change in history(stack))
    until(lambda: size(stack)["target"] < 4, 120)
    assert time.monotonic() - since_s >= held_s - 2.0
