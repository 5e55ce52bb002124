"""Prefill and decode on different replicas through the whole stack, on simulated engines."""

from collections.abc import Iterator

import pytest

from tests.support.stack import Stack, kill_9, running, texts, until, verdict

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SIMULATED = {
    "model": "embedded",
    "engine": {"kind": "simulated", "num_cpus": 0.1, "max_num_batched_tokens": 8192},
    "profile": "h100_sxm__llama-3.1-8b",
    "disaggregation": {"prefill": 2, "adapt": False},
    "fleet": {"num_replicas": 4, "stall_timeout_s": 6.0},
}
PROMPTS = [f"Tell me story number {i}, please: " * (1 + 7 * (i % 4)) for i in range(12)]


@pytest.fixture(scope="module")
def simulated() -> Iterator[Stack]:
    with running(SIMULATED) as up:
        yield up


def sides(stack: Stack) -> dict[str, str]:
    return {replica["replica"]: replica["phase"] for replica in stack.live()}


def test_the_verdict_names_the_replica_that_decodes(simulated: Stack) -> None:
    until(lambda: sorted(sides(simulated).values()) == ["decode", "decode", "prefill", "prefill"])
    answer = simulated.client.completions.create(
        model="embedded", prompt=PROMPTS[3], max_tokens=20, extra_body={"ignore_eos": True}
    )
    slo = verdict(answer)
    assert sides(simulated)[slo["replica"]] == "decode"
    assert (slo["admitted"], slo["met"], slo["resumed"]) == (True, True, 0)
    assert slo["predicted_ttft_ms"] > 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_streams_survive_the_death_of_either_side(simulated: Stack, side: str) -> None:
    until(lambda: len(simulated.live()) == 4, 60)
    undisturbed = texts(simulated.client, PROMPTS, 300)
    assert {len(text) for text in undisturbed} == {300}
    victim = next(replica for replica in simulated.live() if replica["phase"] == side)
    assert texts(simulated.client, PROMPTS, 300, lambda: kill_9(victim["pid"])) == undisturbed
    until(lambda: sorted(sides(simulated).values()) == ["decode", "decode", "prefill", "prefill"], 90)
    simulated.settle()
