"""A prompt computed by one real engine and decoded by another: the same tokens as from one engine alone."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.messages import PREFILLED, Delta, Submission
from replicas.kv_transfer import SUBFOLDER
from replicas.vllm_codec import decode_request, encode_request, with_emitted
from tests.support.engine_driver import BEST_EFFORT, LOOSE, TIGHT, Driver, submission

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

BLOCK = 32
# Around the ends of a block and of a chunk, where a hand-over may lose or repeat a token.
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 255, 256, 257, 20 * BLOCK, 777)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[Driver, Driver]]:
    """One to prefill, one to decode; chunks of 256 tokens."""
    settings: dict[str, Any] = dict(kv_cache_gib=0.05, max_num_seqs=16, max_num_batched_tokens=256)
    drivers = []
    try:
        for _ in range(2):
            options = {"shared_storage_path": str(folder)}
            drivers.append(Driver(**settings, kv_connector="files", kv_connector_extra_config=options))
        yield drivers[0], drivers[1]
    finally:
        for driver in drivers:
            driver.stop()


def requests(tag: str, count: int = 24, seed: int = 0) -> list[Submission]:
    choose = random.Random(seed)
    batch = []
    for i in range(count):
        prompt = [choose.randrange(32, 127) for _ in range(LENGTHS[i % len(LENGTHS)])]
        batch.append(submission(f"{tag}-{i}", prompt, choose.randrange(2, 50), (TIGHT, LOOSE, BEST_EFFORT)[i % 3]))
    return batch


def deltas(driver: Driver, batch: list[Submission]) -> dict[str, list[Delta]]:
    """Everything that the engine emits for the batch."""
    import asyncio

    seen: dict[str, list[Delta]] = {each.request_id: [] for each in batch}

    async def read() -> None:
        await driver.engine.submit(batch)
        left = set(seen)
        while left:
            for delta in await asyncio.wait_for(driver.engine.next_outputs(), 120):
                seen[delta.request_id].append(delta)
                if delta.finish:
                    left.discard(delta.request_id)

    driver.runner.run(read())
    return seen


def prefilled(driver: Driver, batch: list[Submission]) -> list[Submission]:
    """The same requests after their prefill, as they go on to the engine that decodes."""
    asked = [msgspec.structs.replace(each, prefill_only=True) for each in batch]
    moved = []
    for each, seen in zip(batch, deltas(driver, asked).values(), strict=True):
        (delta,) = seen
        assert (len(delta.token_ids), delta.finish) == (1, PREFILLED)
        assert delta.transfer
        request = with_emitted(decode_request(each.payload), list(delta.token_ids))
        payload = encode_request(request)
        moved.append(msgspec.structs.replace(each, emitted_tokens=1, payload=payload, transfer=delta.transfer))
    return moved


def text(seen: list[Delta]) -> list[int]:
    return [token for delta in seen for token in delta.token_ids]


def first_tokens(moved: list[Submission]) -> list[list[int]]:
    return [decode_request(each.payload).prompt_token_ids[each.prompt_tokens :] for each in moved]


def test_two_engines_say_what_one_says(engines: tuple[Driver, Driver], folder: Path) -> None:
    """Whole prompts and prompts in chunks, whole blocks and broken ones."""
    prefill, decode = engines
    alone = [text(seen) for seen in deltas(decode, requests("alone", seed=1)).values()]
    decode.runner.run(decode.engine._client.reset_prefix_cache_async())
    decode.engine.take_steps()
    moved = prefilled(prefill, requests("moved", seed=1))
    decoded = deltas(decode, moved)
    both = [first + text(decoded[each.request_id]) for first, each in zip(first_tokens(moved), moved, strict=True)]
    assert both == alone
    computed = sum(step.batch_tokens for step in decode.engine.take_steps())
    emitted = sum(len(tokens) for tokens in both)
    assert computed <= emitted + len(moved) * (BLOCK + 1), "prompts were fetched, not computed again"
    assert list((folder / SUBFOLDER).iterdir()) == [], "what was read is gone"


@pytest.mark.parametrize("damage", ["gone", "cut off"])
def test_a_hand_over_that_cannot_be_read_is_computed_anew(
    engines: tuple[Driver, Driver], folder: Path, damage: str
) -> None:
    prefill, decode = engines
    batch = requests(f"alone {damage}", 8, seed=2)
    alone = [text(seen) for seen in deltas(decode, batch).values()]
    decode.runner.run(decode.engine._client.reset_prefix_cache_async())
    moved = prefilled(prefill, requests(damage, 8, seed=2))
    for file in (folder / SUBFOLDER).glob("*/*"):
        file.unlink() if damage == "gone" else file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    decoded = deltas(decode, moved)
    both = [first + text(decoded[each.request_id]) for first, each in zip(first_tokens(moved), moved, strict=True)]
    assert both == alone


def test_a_request_of_one_token_ends_where_it_is_prefilled(engines: tuple[Driver, Driver]) -> None:
    prefill, _ = engines
    (seen,) = deltas(prefill, [submission("one", [100] * 40, 1, LOOSE)]).values()
    assert [delta.finish for delta in seen] == ["length"]
