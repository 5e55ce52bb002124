"""Ticks from an engine process to its replica."""

import asyncio
from pathlib import Path

from controller.wire import Step
from replicas.engine_link import RequestTick, Tick, TickReceiver, TickSender


def step(tokens: int) -> Step:
    return Step(tokens, 0.0, 0.0, 1, 0.0, 0.01)


def test_nothing_is_lost_while_the_replica_does_not_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        ticks: list[Tick] = []
        receiver = TickReceiver(str(tmp_path / "ticks"), ticks.append)
        sender = TickSender(receiver.path)
        sent = [sender.send(i, 0.0, 10 * i, step(i), [RequestTick("a", i, True)]) for i in range(1, 901)]
        assert not all(sent)  # the queue was full
        async with asyncio.timeout(5):
            while not ticks or ticks[-1].steps < 900:
                await asyncio.sleep(0.001)
                sender.send(900, 0.0, 0, None, [])
        recent = [at.batch_tokens for tick in ticks for at in tick.recent]
        assert recent == list(range(1, 901))
        assert ticks[0].requests == (RequestTick("a", 1, True),)
        assert ticks[-1].requests == ()
        for i in range(5000):
            sender.send(i, 0.0, 0, step(i), None)
        ticks.clear()
        async with asyncio.timeout(5):
            while not ticks or ticks[-1].recent[-1].batch_tokens < 4999:
                await asyncio.sleep(0.001)
                sender.send(5000, 0.0, 0, None, [])
        kept = [at.batch_tokens for tick in ticks for at in tick.recent]
        assert kept[-1000:] == list(range(4000, 5000))
        receiver.close()
        assert not sender.send(901, 0.0, 0, step(1), None)
        sender.close()
        assert not (tmp_path / "ticks").exists()

    asyncio.run(scenario())
