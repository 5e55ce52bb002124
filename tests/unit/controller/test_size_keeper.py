"""The loop that keeps the fleet's size, over a Serve that fails, redeploys and forgets."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from controller import size_keeper
from controller.scaling.allocation import AllocationOptions
from controller.scaling.signals import Actions, ScalingOptions, Serve
from controller.serve_scaler import ScalingError
from controller.size_keeper import SizeKeeper
from tests.support.fleet_cases import fleet, report

SIZE, CONFIGURED = 6, 2


class PlayedError(BaseException):
    """The script is at its end; no ``Exception``, which the keeper would survive."""


@dataclass
class ScriptedServe:
    """What Serve says, look by look: a size, or what fails."""

    script: Iterator[Serve | str]
    fails_to_resize: bool = False
    asked: list[int] = field(default_factory=list)

    async def size(self) -> Serve:
        told = next(self.script, None)
        if told is None:
            raise PlayedError
        if isinstance(told, str):
            raise ScalingError(told)
        return told

    async def resize(self, replicas: int) -> None:
        self.asked.append(replicas)
        if self.fails_to_resize:
            raise ScalingError("no route")

    async def remove(self, replicas: Sequence[str]) -> list[str]:
        raise AssertionError(f"nothing leaves here: {replicas}")


def play(monkeypatch: pytest.MonkeyPatch, serve: ScriptedServe) -> tuple[SizeKeeper, int | None]:
    """The keeper of a fleet of six, after the script; and the size that it wants then."""
    monkeypatch.setattr(size_keeper, "SCALE_S", 0.0)
    options = ScalingOptions(min_replicas=1, max_replicas=20, configured=CONFIGURED, group="g")
    state = fleet(allocation=AllocationOptions(scaling=options))
    for i in range(SIZE):
        state.report(report(f"g/{i}"), 0.0)
    looks = iter(range(1000))
    keeper = SizeKeeper(lambda _options: serve, lambda: float(next(looks)))
    with pytest.raises(PlayedError):
        asyncio.run(keeper.run(lambda: state))
    assert state.allocation.autoscaler is not None
    return keeper, state.allocation.autoscaler.target


def before_and_after(*meanwhile: str) -> Iterator[Serve | str]:
    """A deploy that sets the size to what the configuration says."""
    return iter([Serve(SIZE, SIZE, 100.0), *meanwhile, Serve(CONFIGURED, CONFIGURED, 101.0)])


@pytest.mark.parametrize("meanwhile", [(), ("application 'polyslo' has no deployment 'replica'",) * 3])
def test_a_deploy_leaves_the_size_also_where_serve_tells_nothing_meanwhile(
    monkeypatch: pytest.MonkeyPatch, meanwhile: tuple[str, ...]
) -> None:
    serve = ScriptedServe(before_and_after(*meanwhile))
    keeper, target = play(monkeypatch, serve)
    assert (serve.asked, target) == ([SIZE], SIZE)
    assert keeper.error == ""


def test_where_a_change_fails_what_serve_says_next_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = ScriptedServe(before_and_after(), fails_to_resize=True)
    keeper, target = play(monkeypatch, serve)
    assert (serve.asked, target, keeper.error) == ([SIZE], None, "no route")


def test_options_that_come_while_serve_answers_do_not_take_an_own_change_for_one_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(size_keeper, "SCALE_S", 0.0)
    before, after = (
        fleet(allocation=AllocationOptions(scaling=ScalingOptions(max_replicas=most, group="g"))) for most in (20, 21)
    )
    before.report(report("g/0"), 0.0)
    state, answers = before, iter(range(1, 6))

    class Obedient(ScriptedServe):
        """Serve; demand and other options come while it gives its second answer."""

        async def size(self) -> Serve:
            nonlocal state
            if next(answers, None) == 2:
                for uid in range(300):
                    before.allocation.demand.note(uid, "tight", 1000, 200, 1.0)
                after.adopt_state(before, 1.0)
                state = after
            told = await super().size()
            return told._replace(replicas=self.asked[-1] if self.asked else 1)

    serve, looks = Obedient(iter([Serve(1, 1, 100.0)] * 5)), iter(range(1000))
    with pytest.raises(PlayedError):
        asyncio.run(SizeKeeper(lambda _options: serve, lambda: 0.1 * next(looks)).run(lambda: state))
    scaler = after.allocation.autoscaler
    assert scaler is not None
    assert len(serve.asked) == 1
    assert serve.asked[0] == scaler.target
    assert scaler.held_until_s < 0.0, "nobody has set it by hand"


def test_a_drained_replica_that_serve_has_forgotten_is_not_counted_as_ended() -> None:
    class Forgetful(ScriptedServe):
        async def remove(self, replicas: Sequence[str]) -> list[str]:
            return [name for name in replicas if name != "g/1"]

    state = fleet(allocation=AllocationOptions(scaling=ScalingOptions(max_replicas=20, group="g")))
    for i in range(3):
        state.report(report(f"g/{i}"), 0.0)
    scaler = state.allocation.autoscaler
    assert scaler is not None
    scaler.target = 3
    keeper, serve = SizeKeeper(lambda _options: serve, lambda: 0.0), Forgetful(iter([]))
    asyncio.run(keeper.carry_out(Actions(remove=("g/0", "g/1")), serve, lambda: state))
    assert scaler.target == 2
    assert sorted(state.replicas) == ["g/1", "g/2"]
