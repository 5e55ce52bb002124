"""A prompt computed by one driven engine and decoded by another."""

import asyncio

import msgspec

from protocol.messages import PREFILLED, Delta, Submission
from replicas.vllm_codec import decode_request, encode_request, with_emitted
from tests.support.engine_driver import Driver


def deltas(driver: Driver, batch: list[Submission]) -> dict[str, list[Delta]]:
    """Everything that the engine emits for the batch."""
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
