"""What a replica says of its prefix cache, against vLLM's own block pool."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from controller.mirror.told_prefixes import ToldPrefixes
from protocol.messages import Slo
from protocol.prefixes import EVERYTHING
from replicas.held_prefixes import HeldPrefixes
from routing.prefix_index import hash_prefix, hash_spacing, salt_of

BLOCK = 32
PATIENT = Slo(ttft_s=60.0, tpot_s=5.0)
SALT = salt_of(None, "")


class Told:
    """A scheduler whose events a replica follows, and a controller that takes its reports."""

    def __init__(self, bench: Any) -> None:
        from replicas.vllm_kv_events import KvEventReader

        self.bench, self.reader = bench, KvEventReader(None, BLOCK)
        self.held = self.reader.held = HeldPrefixes(BLOCK)
        self.controller, self.reports = ToldPrefixes(), 0
        bench.scheduler.kv_event_publisher.shutdown()
        bench.scheduler.kv_event_publisher = self
        self.batches = 0

    def publish(self, batch: Any) -> None:
        self.reader.take(self.batches, msgspec.msgpack.encode(batch))
        self.batches += 1

    def shutdown(self) -> None:
        """What benches call at their end."""

    def report(self) -> None:
        news = self.held.news()
        assert self.controller.take(news, self.reports) is not None
        self.held.record(msgspec.structs.replace(REPORT, sequence=self.reports, prefixes=news))
        self.reports += 1

    def certain_tokens(self, prompt: list[int], spare_tokens: float) -> int:
        hits = self.controller.hits(hash_prefix(prompt, BLOCK, SALT), spare_tokens)
        return min(hits * hash_spacing(len(prompt), BLOCK), (len(prompt) - 1) // BLOCK * BLOCK)


def report_of() -> Any:
    from tests.support.fleet_cases import report

    return report("a")


REPORT = report_of()


def conversation(choose: random.Random, so_far: dict[int, list[int]]) -> list[int]:
    """A prompt that goes on from an earlier one, or shares the beginning of all, or is new."""
    kind = choose.random()
    tokens = [choose.randrange(100) for _ in range(choose.randint(1, 150))]
    if kind < 0.5 and so_far:
        return (choose.choice([*so_far.values()]) + tokens)[:600]
    return ([7] * 70 if kind < 0.8 else []) + tokens


@pytest.mark.parametrize("seed", range(6))
def test_what_is_told_is_what_vllm_would_find(make_bench: Callable[..., Any], seed: int) -> None:
    """On a cache so small that most is evicted. Twins of a block count as gone with the first of them."""
    choose, told = random.Random(seed), Told(make_bench(blocks=48, max_num_seqs=4, tells_prefixes=True))
    asked: dict[int, list[int]] = {}
    found = 0
    for number in range(40):
        prompt = asked[number] = conversation(choose, asked)
        told.report()
        request = told.bench.add(f"r{number}", prompt, choose.randint(1, 40), PATIENT)
        there = told.bench.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        assert told.certain_tokens(prompt, 10**6) == there
        found += there
        told.bench.run()
    assert found > 40 * BLOCK
    assert len(told.held) < 48


@pytest.mark.parametrize("seed", range(6))
def test_a_certain_hit_is_there_when_the_request_begins(make_bench: Callable[..., Any], seed: int) -> None:
    """Whatever all requests that were there before it do until their ends."""
    choose, told = random.Random(seed), Told(make_bench(blocks=64, max_num_seqs=4, tells_prefixes=True))
    live: dict[str, tuple[list[int], int]] = {}
    asked: dict[int, list[int]] = {}
    counted = uncounted = 0
    for number in range(60):
        for _ in range(choose.randint(0, 30)):
            told.bench.step()
        for name in [name for name in live if name in told.bench.finished]:
            prompt, output = live.pop(name)
            told.controller.release(len(prompt) + output + BLOCK)
        told.report()
        prompt, output = conversation(choose, asked), choose.randint(1, 60)
        asked[number] = prompt
        peak = sum(len(p) + o + BLOCK for p, o in [*live.values(), (prompt, output)])
        certain, presumed = (told.certain_tokens(prompt, spare) for spare in (63 * BLOCK - peak, 10**6))
        uncounted += presumed - certain
        told.controller.use(hash_prefix(prompt, BLOCK, SALT))
        live[f"r{number}"] = prompt, output
        if certain or choose.random() < 0.3:  # all before it run to their ends first
            told.bench.run()
            request = told.bench.add(f"r{number}", prompt, output, PATIENT)
            assert told.bench.scheduler.kv_cache_manager.get_computed_blocks(request)[1] >= certain
            counted += certain
        else:
            told.bench.add(f"r{number}", prompt, output, PATIENT)
    assert counted > 10 * BLOCK
    assert uncounted > 10 * BLOCK, "some of what is there is not certain to stay"


def test_after_a_gap_in_the_events_everything_is_told_anew(make_bench: Callable[..., Any]) -> None:
    told = Told(make_bench(blocks=48, max_num_seqs=4, tells_prefixes=True))
    told.report()
    prompt = list(range(200))
    told.bench.add("a", prompt, 1, PATIENT)
    told.bench.run()
    told.report()
    assert told.certain_tokens(prompt, 10**6) == 192
    told.batches += 1  # one was lost
    told.bench.add("b", [1] * 200, 1, PATIENT)
    told.bench.run()
    assert told.held.news().since == EVERYTHING
    told.report()
    assert len(told.controller) == 6
    assert told.certain_tokens([1] * 200, 10**6) == 0, "nobody knows when it was last used"
    told.controller.use(hash_prefix([*prompt, *[1] * 200], BLOCK, SALT))
    told.controller.use(hash_prefix([1] * 200, BLOCK, SALT))
    assert told.certain_tokens(prompt, 10**6) == 0
    assert told.certain_tokens([1] * 200, 10**6) == 192


def test_the_cache_is_emptied(make_bench: Callable[..., Any]) -> None:
    told = Told(make_bench(blocks=48, max_num_seqs=4, tells_prefixes=True))
    told.bench.add("a", list(range(200)), 1, PATIENT)
    told.bench.run()
    told.report()
    assert told.bench.scheduler.reset_prefix_cache()
    told.bench.add("b", [1] * 40, 1, PATIENT)
    told.bench.run()
    told.report()
    assert told.certain_tokens(list(range(200)), 10**6) == 0


def test_a_salt_parts_prompts_and_adapters_do(make_bench: Callable[..., Any]) -> None:
    from vllm.distributed.kv_events import BlockStored

    held, tokens = HeldPrefixes(2), [1, 2, 3, 4]
    cases = [(None, None, [None, None]), ("s", None, [("s",), None]), (None, "l", [("l",), ("l",)])]
    cases.append(("s", "l", [("l", "s"), ("l",)]))
    for i, (_, adapter, keys) in enumerate(cases):
        event = BlockStored([2 * i, 2 * i + 1], None, tokens, 2, None, "GPU", adapter, keys)
        held.store(event, 0, "GPU")
    book = ToldPrefixes()
    book.take(held.news(), 0)
    for salt, adapter, _ in cases:
        book.use(hash_prefix(tokens, 2, salt_of(salt, adapter or "")))
        assert book.hits(hash_prefix(tokens, 2, salt_of(salt, adapter or "")), 10.0) == 2
    assert len(book) == 8


@pytest.mark.parametrize(
    "change",
    [
        {"extra_keys": [(("image", 0),), None]},
        {"extra_keys": [("a", "b"), None]},
        {"medium": "CPU"},
        {"block_size": 4},
        {"parent_block_hash": 99},
        {"token_ids": [1, 2]},
    ],
)
def test_what_cannot_be_followed_is_left_out(change: dict[str, Any]) -> None:
    from vllm.distributed.kv_events import BlockStored

    held = HeldPrefixes(2)
    plain = BlockStored([1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None)
    held.store(msgspec.structs.replace(plain, **change), 0, change.get("medium", "GPU"))
    assert len(held) == 0


def test_of_a_model_with_several_kinds_of_cache_nothing_is_told() -> None:
    from vllm.distributed.kv_events import BlockStored

    held, plain = HeldPrefixes(2), BlockStored([1], None, [1, 2], 2, None, "GPU", None)
    for group in (0, 1, 0):
        held.store(plain, group, "GPU")
    assert len(held) == 0


def test_events_are_read_from_vllms_own_publisher(make_bench: Callable[..., Any]) -> None:
    from replicas.vllm_kv_events import KvEventReader

    bench = make_bench(blocks=48, max_num_seqs=4, tells_prefixes=True)

    async def follow() -> int:
        reader = KvEventReader(bench.scheduler.vllm_config.kv_events_config, BLOCK)
        assert reader.held is not None
        for number in range(100):
            bench.add(f"r{number}", [number] * 100, 1, PATIENT)
            bench.run()
            await asyncio.sleep(0.02)
            if len(reader.held):
                break
        reader.stop()
        return len(reader.held)

    assert asyncio.run(follow()) == 3


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "tcp://127.0.0.1:5557"),
        ({"endpoint": "tcp://*:0"}, ""),
        ({"endpoint": "tcp://elsewhere:5557"}, ""),
        ({"endpoint": "ipc:///x"}, "ipc:///x"),
        ({"publisher": "null"}, ""),
        ({"enable_kv_cache_events": False}, ""),
    ],
)
def test_events_that_a_user_has_configured_are_read_where_that_can_be(settings: dict[str, Any], told: str) -> None:
    from vllm.config.kv_events import KVEventsConfig

    from replicas.vllm_kv_events import readable_endpoint

    assert readable_endpoint(KVEventsConfig(**{"enable_kv_cache_events": True} | settings)) == told
    assert readable_endpoint(None) == ""


def test_a_report_that_was_not_taken_is_said_again() -> None:
    from vllm.distributed.kv_events import BlockStored

    held = HeldPrefixes(2)
    for name in (1, 2, 3):
        held.store(BlockStored([name], None, [name, name], 2, None, "GPU", None), 0, "GPU")
    first = held.news()
    held.remove([1], "GPU")
    held.record(msgspec.structs.replace(REPORT, sequence=5, prefixes=first))
    second = held.news()
    assert (second.since, len(second.removed), len(second.stored)) == (5, 8, 0)
    held.store(BlockStored([4], None, [4, 4], 2, None, "GPU", None), 0, "GPU")
    third = held.news()
    assert (third.since, len(third.removed), len(third.stored)) == (5, 8, 8)
    held.record(msgspec.structs.replace(REPORT, sequence=6, prefixes=second))
    assert held.news().since == 5, "what was built later stands"
