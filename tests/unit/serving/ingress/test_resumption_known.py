"""Where a client takes up its stream at an ingress that knows no replica yet."""

import asyncio

import pytest

from protocol.kept_streams import KeptStream
from serving.ingress import resumption


@pytest.mark.parametrize("is_told", [True, False])
def test_an_ingress_that_has_just_started_hears_of_its_replicas_first(
    is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas, asked = set[str](), list[str]()
    monkeypatch.setattr(resumption, "KNOWN_S", 60.0 if is_told else 0.02)

    async def take(replica: str, _key: str) -> KeptStream | None:
        asked.append(replica)
        return None

    async def play() -> None:
        finding = asyncio.create_task(resumption.Resumption(take, lambda: replicas)._taken("a", "key"))
        await asyncio.sleep(0.01)
        assert not asked
        if is_told:
            replicas.add("a")
        await asyncio.wait_for(finding, 30)

    asyncio.run(play())
    assert asked == (["a"] if is_told else [])


def test_an_ingress_that_has_long_run_does_not_wait_for_a_replica_that_nobody_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client could have made every request wait."""
    monkeypatch.setattr(resumption, "KNOWN_S", 1000.0)

    async def play() -> None:
        resumed = resumption.Resumption(known=lambda: {"a"})
        resumed._born_s -= 1001.0
        assert await asyncio.wait_for(resumed._taken("b", "key"), 10) is None

    asyncio.run(play())
