"""Two controllers for one fleet, over real Ray and HTTP: whoever dies, replicas are adopted and promises are kept."""

import copy
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.stack import Stack, kill_9, running, texts, until, verdict

pytestmark = pytest.mark.integration

REPLICAS = 4
ARGS: dict[str, Any] = {
    "model": "embedded",
    "engine": {"kind": "simulated", "num_cpus": 0.1, "per_process": 2},
    "profile": "h100_sxm__llama-3.1-8b",
    "fleet": {"num_replicas": REPLICAS, "controller_shards": 2},
}
PROMPTS, TOKENS = [f"line number {i}" for i in range(12)], 300


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(ARGS) as up:
        until(lambda: sizes(up) == [2, 2], 90, lambda: sizes(up))
        yield up


def shards(stack: Stack) -> list[dict[str, Any]]:
    return list(stack.status().get("shards", []))


def sizes(stack: Stack) -> list[int | None]:
    """Live replicas of each shard; none of one that does not answer."""
    return [shard.get("live") for shard in shards(stack)]


def ask(stack: Stack, text: str) -> dict[str, Any]:
    """What becomes of a short request."""
    return verdict(
        stack.client.completions.create(
            model="embedded", prompt=text, max_tokens=2, extra_headers={"x-slo-tier": "interactive"}
        )
    )


def test_every_replica_serves_and_both_controllers_decide(stack: Stack) -> None:
    before = [shard["decisions"] for shard in shards(stack)]
    told = [ask(stack, f"number {i}") for i in range(8 * REPLICAS)]
    assert all(each["admitted"] and each["predicted_ttft_ms"] > 0 for each in told)
    assert len({each["replica"] for each in told}) == REPLICAS
    until(lambda: all(now["decisions"] > old for now, old in zip(shards(stack), before, strict=True)), 10)
    until(lambda: stack.status()["attainment"]["interactive"]["requests"] >= len(told), 10)
    stack.settle()


@pytest.mark.parametrize("dead", [1, 0])
def test_replicas_of_a_dead_controller_are_adopted(stack: Stack, dead: int) -> None:
    undisturbed = texts(stack.client, PROMPTS, TOKENS)
    victim = shards(stack)[dead]["pid"]
    assert texts(stack.client, PROMPTS, TOKENS, lambda: kill_9(victim)) == undisturbed
    until(lambda: sizes(stack) == [2, 2], 90, lambda: sizes(stack))
    victim, killed_s = shards(stack)[dead]["pid"], time.monotonic()
    kill_9(victim)
    until(lambda: any(size == REPLICAS for size in sizes(stack)), 30, lambda: sizes(stack))
    print(f"adopted after {time.monotonic() - killed_s:.1f} s")
    assert ask(stack, "in between")["admitted"]
    until(lambda: sizes(stack) == [2, 2], 90, lambda: sizes(stack))
    assert shards(stack)[dead]["pid"] != victim


def test_the_number_of_controllers_changes_while_they_serve(stack: Stack) -> None:
    undisturbed = texts(stack.client, PROMPTS, TOKENS)
    for version, count in ((2, 1), (3, 3)):
        changed = copy.deepcopy(stack.document)
        table = changed["applications"][0]["deployments"][0]["user_config"]
        table |= {"version": version, "fleet": {"controller_shards": count}}
        assert texts(stack.client, PROMPTS, TOKENS, partial(stack.deploy, changed)) == undisturbed
        if count == 1:
            until(lambda: len(stack.live()) == REPLICAS and "shards" not in stack.status(), 60)
        else:
            until(lambda: sorted(map(str, sizes(stack))) == ["1", "1", "2"], 90, lambda: sizes(stack))
        assert ask(stack, f"with {count}")["admitted"]
