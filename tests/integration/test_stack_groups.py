"""A fleet of two kinds of GPUs (simulated engines), each kind a group with its own profile, as one fleet of tiers."""

from collections.abc import Iterator

import pytest

from tests.support.stack import Stack, kill_9, running, texts, until

pytestmark = pytest.mark.integration

ARGS = {
    "model": "embedded",
    "engine": {"kind": "simulated", "num_cpus": 0.1, "max_num_batched_tokens": 8192},
    "groups": [
        {"name": "h100", "profile": "h100_sxm__llama-3.1-8b"},
        {"name": "a100", "profile": "a100_sxm__llama-3.1-8b", "engine": {"max_num_seqs": 32}},
    ],
    "fleet": {"stall_timeout_s": 6.0},
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(ARGS) as up:
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
