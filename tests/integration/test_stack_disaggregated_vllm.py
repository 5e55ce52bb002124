"""Prefill and decode on two real engines through the whole stack: the same text as from one of them."""

from collections.abc import Iterator

import pytest

from tests.integration.test_stack_disaggregated import PROMPTS, sides
from tests.support.stack import Stack, kill_9, running, texts, until

pytestmark = [pytest.mark.integration, pytest.mark.alone, pytest.mark.timeout(600)]

ARGS = {
    "model": "embedded",
    "engine": {"kind": "vllm", "num_cpus": 0.5, "kv_cache_gib": 0.1, "enable_prefix_caching": False},
    "fleet": {"num_replicas": 2, "stall_timeout_s": 20.0},
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = {"shared_storage_path": str(tmp_path_factory.mktemp("kv"))}
    with running(ARGS | {"disaggregation": {"prefill": 1, "kv_connector_extra_config": options}}) as up:
        yield up


def test_real_engines_apart_say_what_one_says(real: Stack) -> None:
    """A seed (of no effect on greedy sampling) keeps a request on one engine: the reference."""
    until(lambda: sorted(sides(real).values()) == ["decode", "prefill"])
    whole = texts(real.client, PROMPTS, 60, seed=1)
    apart = texts(real.client, PROMPTS, 60)
    assert apart == whole
    assert len(set(apart)) > 6, "the model's output depends on its prompt"
    real.settle()


def test_real_streams_survive_the_death_of_the_decoding_engine(real: Stack) -> None:
    """The engine that prefilled goes on with them; the newcomer takes the dead one's side."""
    undisturbed = texts(real.client, PROMPTS, 120)
    victim = next(replica for replica in real.live() if replica["phase"] == "decode")
    assert texts(real.client, PROMPTS, 120, lambda: kill_9(victim["pid"])) == undisturbed
    until(lambda: sorted(sides(real).values()) == ["decode", "prefill"], 240)
