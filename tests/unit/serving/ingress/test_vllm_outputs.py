"""Outputs of a request that wait for vLLM's output handler become one; nothing is lost, doubled or reordered."""

import asyncio

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from vllm.v1.engine import EngineCoreOutput, FinishReason

from protocol.messages import Delta
from serving.dispatch.delivery_pace import DeliveryPace
from serving.ingress.vllm_outputs import PendingOutputs


def taken(pending: PendingOutputs) -> list[EngineCoreOutput]:
    return asyncio.run(asyncio.wait_for(pending.take(), 5))


def with_more(request_id: str, token: int) -> Delta:
    """A delta that carries the engine's own output."""
    output = EngineCoreOutput(request_id, [token], num_nans_in_logits=1)
    return Delta(request_id, (token,), extra=msgspec.msgpack.encode(output))


def test_new_tokens_join_those_that_wait() -> None:
    pending = PendingOutputs()
    pending.add([Delta("a", (1,)), Delta("b", (7,))])
    pending.add([Delta("a", (2, 3)), Delta("c", (9,))])
    pending.add([Delta("a", (), "stop", 3)])
    first, *others = taken(pending)
    assert (first.request_id, first.new_token_ids) == ("a", [1, 2, 3])
    assert (first.finish_reason, first.stop_reason) == (FinishReason.STOP, 3)
    assert [(output.request_id, output.new_token_ids) for output in others] == [("b", [7]), ("c", [9])]


def test_what_was_taken_takes_nothing_more() -> None:
    pending = PendingOutputs()
    pending.add([Delta("a", (1,))])
    before = taken(pending)
    pending.add([Delta("a", (2,))])
    assert [output.new_token_ids for output in before + taken(pending)] == [[1], [2]]


def test_unreadable_news_add_nothing() -> None:
    pending = PendingOutputs()
    with pytest.raises(msgspec.MsgspecError):
        pending.add([Delta("a", (1,)), Delta("b", (2,), extra=b"\xc1")])
    pending.add([Delta("a", (1,))])
    assert [output.new_token_ids for output in taken(pending)] == [[1]]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=40))
def test_each_request_gets_its_tokens_in_order(news: list[tuple[str, bool, bool]]) -> None:
    sent, got = dict[str, list[int]](), dict[str, list[int]]()

    async def play() -> None:
        pending = PendingOutputs()
        for token, (request_id, has_extra, is_taken) in enumerate(news):
            sent.setdefault(request_id, []).append(token)
            pending.add([with_more(request_id, token) if has_extra else Delta(request_id, (token,))])
            if is_taken or token == len(news) - 1:
                for output in await asyncio.wait_for(pending.take(), 5):
                    assert output.num_nans_in_logits == 0 or len(output.new_token_ids) == 1
                    got.setdefault(output.request_id, []).extend(output.new_token_ids)

    asyncio.run(play())
    assert got == sent


def test_tokens_that_come_during_the_pause_after_a_delivery_are_delivered_together() -> None:
    async def play() -> list[list[int]]:
        pace = DeliveryPace()
        pending, taken = PendingOutputs(pace), list[list[int]]()
        for turn in range(2):
            pending.add([Delta("a", (turn,))])
            taking = asyncio.create_task(pending.take())
            await asyncio.sleep(0.01)
            pending.add([Delta("a", (10 + turn,))])
            taken.append([token for output in await taking for token in output.new_token_ids])
            pace._free_until_s = asyncio.get_running_loop().time() + 0.05
        return taken

    assert asyncio.run(play()) == [[0], [10, 1, 11]]
