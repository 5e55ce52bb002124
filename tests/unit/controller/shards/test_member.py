"""Shards under their leader: a size set by hand holds all of them, and no failure counts as one."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from controller.fleet import Fleet
from controller.scaling.allocation import AllocationOptions
from controller.scaling.autoscaler import Autoscaler
from controller.scaling.signals import ScalingOptions, Serve
from controller.serve_scaler import ScalingError, ServeScaler
from controller.shards import keeper
from controller.shards.keeper import ShardKeeper
from controller.shards.member import Member
from protocol.shards import Part
from tests.support.fleet_cases import fleet

HOLD_S = 600.0


def sized(shards: int = 2, configured: int = 0) -> Fleet:
    scaling = ScalingOptions(max_replicas=20, group="g", manual_hold_s=HOLD_S, configured=configured)
    return fleet(controller_shards=shards, allocation=AllocationOptions(scaling=scaling))


def scaler_of(state: Fleet) -> Autoscaler:
    assert state.allocation.autoscaler is not None
    return state.allocation.autoscaler


class Two:
    """A leader and another shard, which hear of a size that Serve tells the leader."""

    def __init__(self) -> None:
        self.fleets = sized(), sized()
        self.members = Member(0), Member(1)
        self.leader = self.members[0].leader
        self.leader.shards = 2
        self.now_s = 0.0

    def hear(self, serve: Serve) -> None:
        self.now_s += 1.0
        live = self.leader.live(self.now_s)
        self.leader.sizes.follow(serve, live, 0)
        for member, state in zip(self.members, self.fleets, strict=True):
            member.follow(state, self.leader.sync(member.report(state, self.now_s), self.now_s), self.now_s)
            if (part := member.size) is not None:
                told = Serve(part.replicas, part.running, part.deployed)
                state.allocation.scale(told, [], ({}, {}), None, self.now_s)

    def held_s(self) -> list[float]:
        return [scaler_of(state).held_until_s - self.now_s for state in self.fleets]


def test_a_size_set_by_hand_holds_also_the_shard_whose_part_of_it_is_what_it_had() -> None:
    two = Two()
    for _ in range(3):
        two.hear(Serve(5))
    assert [scaler_of(state).target for state in two.fleets] == [3, 2]
    assert max(two.held_s()) < 0.0
    two.hear(Serve(6))
    assert [scaler_of(state).target for state in two.fleets] == [3, 3]
    assert two.held_s() == [HOLD_S, HOLD_S]


def test_a_number_that_a_deploy_changes_holds_no_shard() -> None:
    two = Two()
    for serve in (Serve(5), Serve(5), Serve(5), Serve(6, deployed=1.0)):
        two.hear(serve)
    assert [scaler_of(state).target for state in two.fleets] == [3, 3]
    assert max(two.held_s()) < 0.0


def test_a_change_that_came_to_pass_though_asking_for_it_failed_is_not_by_hand() -> None:
    class Failing(ServeScaler):
        async def resize(self, replicas: int) -> None:
            raise ScalingError("Serve was restarted")

    two = Two()
    for _ in range(3):
        two.hear(Serve(5))
    shard = ShardKeeper(0, "leader", "", lambda: two.now_s)
    shard.member, shard._scaler, shard._fleet = two.members[0], Failing("", ()), lambda: two.fleets[0]
    with pytest.raises(ScalingError):
        asyncio.run(shard.resize_shard(1, 4))
    two.hear(Serve(7))
    assert [scaler_of(state).target for state in two.fleets] == [4, 3]
    assert max(two.held_s()) < 0.0
    two.hear(Serve(8))
    assert min(two.held_s()) > 0.0, "that was somebody's wish"


def test_what_a_shard_has_asked_for_and_given_up_is_not_by_hand_when_it_comes_late() -> None:
    two = Two()
    for _ in range(3):
        two.hear(Serve(5))
    scaler_of(two.fleets[1]).target = None  # its question was not answered in time
    two.hear(Serve(5))
    assert scaler_of(two.fleets[1]).target == 2
    two.leader.sizes.ask(1, 4)
    two.hear(Serve(7))
    assert [scaler_of(state).target for state in two.fleets] == [3, 4]
    assert max(two.held_s()) < 0.0


@pytest.mark.parametrize("told", [Part(4, 4, 0.0, 0), Part(3, 3, 0.0, 0), Part(6, 4, 0.0, 0, moves=1)])
@pytest.mark.parametrize("earlier", ["", "tells its part", "tells nothing"])
def test_a_removal_counts_once_whatever_the_leader_tells_before_it_answers(told: Part, earlier: str) -> None:
    """Also where it cut the part anew while the removal waited for others: the shard asked for too few then."""
    shard = ShardKeeper(1, "leader", "", lambda: 0.0)
    shard.member.size = Part(4, 4, 0.0, 0)

    async def ask(method: str, *arguments: Any, patience_s: float = 1.0) -> object:
        shard.member.size = told
        left = 5 if told.moves else 3
        return {"": (left, ["g/0"]), "tells its part": left, "tells nothing": None}[earlier]

    shard.ask = ask  # type: ignore[method-assign]
    assert asyncio.run(shard._through_leader.remove(["g/0"])) == ["g/0"]
    assert shard.member.size.replicas == (5 if told.moves and earlier != "tells nothing" else 3)


def test_the_leader_answers_a_removal_with_the_part_that_is_left_and_with_those_whom_serve_knew() -> None:
    class Ending(ServeScaler):
        async def remove(self, replicas: Sequence[str]) -> list[str]:
            return list(replicas[:2])

    two = Two()
    for _ in range(3):
        two.hear(Serve(9))
    shard = ShardKeeper(0, "leader", "", lambda: two.now_s)
    shard.member, shard._scaler, shard._fleet = two.members[0], Ending("", ()), lambda: two.fleets[0]
    assert asyncio.run(shard.remove_of_shard(1, ["g/0", "g/1", "g/2"])) == (2, ["g/0", "g/1"])


def test_a_leader_that_was_alone_meanwhile_asks_for_no_size_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "SCALE_S", 0.0)
    says, asked, looks = Serve(3, 3, 1.0), list[int](), 0

    class Telling(ServeScaler):
        async def size(self) -> Serve:
            nonlocal looks
            looks += 1
            return says

        async def resize(self, replicas: int) -> None:
            asked.append(replicas)

    shard, state = ShardKeeper(0, "leader", "", lambda: 0.0), sized(configured=3)
    shard._scaler, shard.member.leader.shards = Telling("", ()), 2
    sizes = shard.member.leader.sizes

    async def look() -> None:
        before = looks
        while looks == before:
            await asyncio.sleep(0)

    async def play() -> None:
        nonlocal says, state
        task = asyncio.create_task(shard.follow_serve(lambda: state))
        await look()
        sizes.ask(0, 5)
        says = Serve(5, 5, 1.0)
        await look()
        several, state = state, sized(1, configured=3)
        for _ in range(10):
            await asyncio.sleep(0)
        says, state = Serve(3, 3, 2.0), several  # it shrank, and a deploy brought the others back
        await look()
        await look()
        task.cancel()

    asyncio.run(play())
    assert asked == []


def test_the_leader_asks_for_what_a_deploy_reset_within_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "SCALE_S", 0.0)
    says, asked = iter([Serve(3, 3, 1.0), Serve(30, 30, 1.0), Serve(3, 30, 2.0)]), list[int]()

    class Telling(ServeScaler):
        async def size(self) -> Serve:
            return next(says)

        async def resize(self, replicas: int) -> None:
            asked.append(replicas)

    shard, state = ShardKeeper(0, "leader", "", lambda: 0.0), sized(configured=3)
    shard._scaler, shard.member.leader.shards = Telling("", ()), 2

    async def play() -> None:
        task = asyncio.create_task(shard.follow_serve(lambda: state))
        while not asked:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(play())
    assert asked == [20]
