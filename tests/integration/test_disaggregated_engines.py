"""A prompt computed by one real engine and decoded by another: the same tokens as from one engine alone."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import Submission
from replicas.kv_transfer import SUBFOLDER
from tests.support.engine_driver import BEST_EFFORT, LOOSE, TIGHT, Driver, submission
from tests.support.hand_over import deltas, first_tokens, prefilled, text

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
