"""Links to shards of the controller come and go with their number."""

import pytest

pytest.importorskip("ray")

from serving.dispatch import shard_book
from tests.support.shard_scene import Scene, ask, pending, play


def test_a_shard_that_is_one_too_many_goes_though_a_client_left_while_its_question_was_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def script(scene: Scene) -> None:
        await scene.load(s0=0.9, s1=0.1)
        for link in scene.links.values():
            link.decide = pending
        await scene.admit(*(ask(f"x{k}") for k in range(20)))
        await scene.configure(1)
        assert scene.shards._shards.keys() == {0, 1}, "it may have to be told how they end"
        monkeypatch.setattr(shard_book, "FORGET_S", 0.0)
        await scene.configure(1)
        assert scene.shards._shards.keys() == {0}

    play(script)
