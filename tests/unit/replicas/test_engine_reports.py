"""Ticks from an engine process to its replica."""

import asyncio
import time
from pathlib import Path

from protocol.messages import Step
from replicas.engine_reports import IterationReport, IterationReportReceiver, IterationReportSender, RequestState


def step(tokens: int) -> Step:
    return Step(tokens, 0.0, 0.0, 1, 0.0, 0.01)


def full_link(folder: Path) -> tuple[list[IterationReport], IterationReportReceiver, IterationReportSender]:
    """A link whose queue has no room; what is read from it, and both of its ends."""
    ticks: list[IterationReport] = []
    receiver = IterationReportReceiver(str(folder / "ticks"), ticks.append)
    sender = IterationReportSender(receiver.path)
    while sender.send(IterationReport(1, 0.0, 500), step(1), None):
        pass
    return ticks, receiver, sender


def test_nothing_is_lost_while_the_replica_does_not_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        ticks: list[IterationReport] = []
        receiver = IterationReportReceiver(str(tmp_path / "ticks"), ticks.append)
        sender = IterationReportSender(receiver.path)
        sent = [
            sender.send(IterationReport(i, 0.0, 10 * i), step(i), [RequestState("a", i, True)]) for i in range(1, 901)
        ]
        assert not all(sent)  # the queue was full
        async with asyncio.timeout(5):
            while not ticks or ticks[-1].steps < 900:
                await asyncio.sleep(0.001)
                sender.send(IterationReport(900, 0.0, 0), None, [])
        recent = [at.batch_tokens for tick in ticks for at in tick.recent]
        assert recent == list(range(1, 901))
        assert ticks[0].requests == (RequestState("a", 1, True),)
        assert ticks[-1].requests == ()
        for i in range(5000):
            sender.send(IterationReport(i, 0.0, 0), step(i), None)
        ticks.clear()
        async with asyncio.timeout(5):
            while not ticks or ticks[-1].recent[-1].batch_tokens < 4999:
                await asyncio.sleep(0.001)
                sender.send(IterationReport(5000, 0.0, 0), None, [])
        kept = [at.batch_tokens for tick in ticks for at in tick.recent]
        assert kept[-1000:] == list(range(4000, 5000))
        receiver.close()
        assert not sender.send(IterationReport(901, 0.0, 0), step(1), None)
        sender.close()
        assert not (tmp_path / "ticks").exists()

    asyncio.run(scenario())


def test_the_last_tick_before_the_engine_idles_waits_for_room(tmp_path: Path) -> None:
    """None follows that could tell how much of its KV cache is free again."""

    async def scenario() -> None:
        ticks, receiver, sender = full_link(tmp_path)
        assert not sender.send(IterationReport(2, 0.0, 0), None, [])
        time.sleep(1.0)  # noqa: ASYNC251 the replica stands still, as when it compiles
        async with asyncio.timeout(5):
            while not ticks or ticks[-1].kv_used_tokens:
                await asyncio.sleep(0.001)
        assert len(ticks[-1].recent) == 1, "the step that found the queue full"
        sender.close()
        receiver.close()

    asyncio.run(scenario())


def test_a_tick_that_waits_for_room_is_dropped_when_a_newer_one_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        ticks, receiver, sender = full_link(tmp_path)
        sender.send(IterationReport(2, 0.0, 0), None, [])
        sender.send(IterationReport(3, 0.0, 700), step(2), [RequestState("new", 0, True)])
        await asyncio.sleep(0.3)  # all is read, and a late sender would have had its turn
        assert {tick.steps for tick in ticks} == {1}
        assert sender.send(IterationReport(4, 0.0, 700), step(3), [RequestState("new", 1, True)])
        await asyncio.sleep(0.01)
        assert [at.batch_tokens for at in ticks[-1].recent] == [1, 2, 3]
        sender.close()
        receiver.close()

    asyncio.run(scenario())


def test_positions_under_long_names_arrive_in_several_datagrams(tmp_path: Path) -> None:
    """64 names of 80 KB were one datagram that no kernel takes, so none of them ever arrived."""

    async def scenario() -> set[str]:
        ticks: list[IterationReport] = []
        receiver = IterationReportReceiver(str(tmp_path / "link"), ticks.append)
        sender = IterationReportSender(receiver.path)
        positions = [RequestState(f"{k:03}" + "x" * 81_920, k, True) for k in range(64)]
        for turn in range(20):  # where the queue is full, the rest goes first next time
            sender.send(IterationReport(turn, 0.0, 0), None, positions)
            await asyncio.sleep(0.001)
        sender.close()
        receiver.close()
        return {at.request_id[:3] for tick in ticks for at in tick.requests or ()}

    assert len(asyncio.run(scenario())) == 64
