"""LoRA adapters over two real engines: a request gets the adapter that its ``model`` names, through HTTP."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.adapters import write_adapter
from tests.support.stack import Stack, running, texts, verdict

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PROMPT = "once upon a time there was a small model " * 3
ADAPTERS = ("poet", "lawyer")
ROUNDS = 6


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("adapters")
    modules = [f"{name}={write_adapter(folder / name, seed)}" for seed, name in enumerate(ADAPTERS, 1)]
    kwargs = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "lora_modules": modules}
    args = {"model": "embedded", "engine_kwargs": kwargs, "fleet": {"num_replicas": 2, "prefix_affinity": 0.5}}
    tiers = [{"name": "standard", "ttft_ms": 60000, "tpot_ms": 5000}, {"name": "batch", "best_effort": True}]
    with running(args, tiers=tiers) as started:
        yield started


def answer(client: openai.OpenAI, model: str) -> openai.types.Completion:
    return client.completions.create(
        model=model, prompt=PROMPT, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )


def test_each_model_name_has_its_own_answer_on_every_replica(stack: Stack) -> None:
    """Also while both adapters and the model itself are in one batch, and where the prompt is cached for another."""
    names = ("embedded", *ADAPTERS)
    said: dict[str, set[str]] = {name: set() for name in names}
    replicas: dict[str, list[str]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            told = answer(stack.client, name)
            said[name].add(told.choices[0].text)
            replicas[name].append(verdict(told)["replica"])
    assert all(len(each) == 1 for each in said.values()), said
    assert len({text for each in said.values() for text in each}) == 3, said
    for name in ADAPTERS:  # a replica that holds the adapter is preferred; on a busy machine it may not be in time
        assert Counter(replicas[name]).most_common(1)[0][1] >= ROUNDS - 1, replicas
    for name in names:  # more than one replica takes: all of them say the same
        crowd = texts(stack.client, [PROMPT] * 6, 24, model=name)
        assert {text[:24] for text in crowd} == said[name]


def test_promises_count_what_the_engine_tells_of_its_prefix_cache_each_adapter_by_itself(stack: Stack) -> None:
    def certain_tokens() -> int:
        return int(httpx.get(f"{stack.url}/polyslo/status", timeout=30).json()["prefixes"]["certain_tokens"])

    prompt = "and then the wise old owl said to the king of the long river " * 8
    for name in ("poet", "embedded"):
        before = certain_tokens()
        stack.client.completions.create(model=name, prompt=prompt, max_tokens=4, temperature=0)
        assert certain_tokens() == before, "nobody has asked this of that adapter"
        for _ in range(20):
            time.sleep(0.5)  # for reports, and for the ingress to hear of the status
            stack.client.completions.create(model=name, prompt=prompt, max_tokens=4, temperature=0)
            if certain_tokens() > before:
                break
        assert certain_tokens() > before


def test_models_are_listed_and_unknown_ones_refused(stack: Stack) -> None:
    cards = {card.id: card for card in stack.client.models.list().data}
    assert set(cards) == {"embedded", *ADAPTERS}
    assert (cards["poet"].model_extra or {})["parent"] == "embedded"
    with pytest.raises(openai.NotFoundError, match="painter"):
        answer(stack.client, "painter")


def test_loading_at_run_time_is_refused_with_a_word(stack: Stack) -> None:
    body = {"lora_name": "painter", "lora_path": "/tmp/painter"}
    refused = httpx.post(f"{stack.url}/v1/load_lora_adapter", json=body, timeout=30)
    assert refused.status_code == 404
    assert "lora_modules" in refused.json()["error"]["message"]


def test_a_wrong_adapter_is_named_before_anything_starts(stack: Stack, tmp_path: Path) -> None:
    from serving.config.app import AppConfig
    from serving.config.base import ConfigError
    from serving.config.vllm_check import check

    large = write_adapter(tmp_path / "large", 3, rank=32)
    for module, told in (
        (f"poet={tmp_path}", "no adapter_config.json"),
        (f"poet={large}", "rank 32 exceeds max_lora_rank 16"),
    ):
        with pytest.raises(ConfigError, match=told):
            check(
                AppConfig.read({"model": "embedded", "engine_kwargs": {"enable_lora": True, "lora_modules": [module]}})
            )
