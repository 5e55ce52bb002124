"""The controller's loop that follows the load: whatever goes wrong, it goes on and says so."""

import asyncio
import gc
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controller import actor, size_keeper
from controller.actor import Controller
from controller.deploys import ABANDONED_S, ApplicationClash
from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from controller.scaling.role import Kind
from controller.scaling.signals import Actions, ScalingOptions, Serve
from controller.scaling.tiers import Tier, TierTable
from controller.serve_scaler import ScalingError, ServeScaler
from profiles.store import load_profile
from protocol.messages import Admission, AdmissionRequest, Report, Slo, Verdict, request_uid
from protocol.starts import Start

ROOT = Path(__file__).parents[3]
H200 = "h200_sxm__llama-3.1-8b"


def table(version: int = 1, low: int = 0) -> TierTable:
    return TierTable.of(version, [Tier("tight", 0.3, 0.03, min_replicas=low), Tier("flex", best_effort=True)])


def fleet(names: str = "ab", **scaling: float) -> Fleet:
    options = ScalingOptions(max_replicas=4, **scaling)  # type: ignore[arg-type]
    state = Fleet(FleetOptions(allocation=AllocationOptions(scaling=options)), table(), load_profile)
    for name in names:
        state.report(Report(name, "1", 1, H200, 400_000, 0, 256, 8192, 0.0), 0.0)
    return state


class FakeServe(ServeScaler):
    """Serve as these tests want it: it gives ``answer`` when asked about its size."""

    def __init__(self, answer: int, on_remove: Callable[[], object] = lambda: None) -> None:
        super().__init__("", ())
        self.answer: int | Exception = answer
        self.on_remove = on_remove

    async def size(self) -> Serve:
        if isinstance(self.answer, Exception):
            raise self.answer
        return Serve(self.answer)

    async def remove(self, replicas: Sequence[str]) -> list[str]:
        self.on_remove()
        self.answer = 1
        return list(replicas)


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(2000):
        if is_so():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come")


def run(scenario: Callable[[Controller], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario with a controller of its own, which decides about its size all the time."""
    monkeypatch.setattr(size_keeper, "SCALE_S", 0.0)
    monkeypatch.setattr(actor, "warm_up", lambda: None)

    async def play() -> None:
        controller = Controller()
        try:
            await scenario(controller)
        finally:
            for task in controller._tasks:
                task.cancel()
            await asyncio.gather(*controller._tasks, return_exceptions=True)

    asyncio.run(play())


@pytest.mark.parametrize(
    "error", [ScalingError("no such thing"), KeyError("Replica-a"), IndexError(), AssertionError()]
)
def test_no_error_ends_it(error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(controller: Controller) -> None:
        serve, state = FakeServe(2), fleet()
        controller.shard._scaler, controller.fleet, scaler = serve, state, state.allocation.autoscaler
        assert scaler is not None
        await until(lambda: scaler.target == 2)
        serve.answer = error
        await until(lambda: bool(controller.sizes.error))
        assert scaler.target == 2, "Serve only did not tell"
        serve.answer = 2
        await until(lambda: not controller.sizes.error)
        assert scaler.target == 2

    run(scenario, monkeypatch)
    (told,) = [each for each in caplog.records if each.name == "polyslo.controller"]
    assert told.exc_info is not None
    assert told.exc_info[1] is error, "with its traceback, once"


def test_a_table_may_turn_roles_on_while_a_replica_is_being_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller) -> None:
        state = controller.fleet = fleet(downscale_delay_s=0.0, downscale_cooldown_s=0.0)
        state.allocation.roles.drain("b", 0.0, "asked")
        serve = controller.shard._scaler = FakeServe(2, on_remove=lambda: state.set_tiers(table(2, low=1), 0.0))
        await controller.sizes.carry_out(Actions(remove=("b",)), serve, lambda: state)
        assert state.allocation.is_dynamic
        assert list(state.replicas) == ["a"]
        scaler = state.allocation.autoscaler
        assert scaler is not None
        await until(lambda: scaler.target == 1)
        assert not controller.sizes.error
        assert state.allocation.roles.names(Kind.DRAINING) == []

    run(scenario, monkeypatch)


@pytest.mark.parametrize(
    ("applications", "told"),
    [
        ({}, "Serve runs no application 'app'"),
        (
            {"app": {"deployments": {"Replica-a": {"target_num_replicas": 2, "replicas": []}}}},
            "no deployment 'Replica-b'",
        ),
    ],
)
def test_what_serve_does_not_run_is_named(applications: dict[str, Any], told: str) -> None:
    scaler = ServeScaler("app", ("Replica-a", "Replica-b"))

    async def answer(method: str, *arguments: Any) -> Any:
        return {"applications": applications}

    scaler._ask = answer  # type: ignore[method-assign]
    for question in (scaler.size, lambda: scaler.resize(3), lambda: scaler.remove(["a/x"])):
        with pytest.raises(ScalingError, match=told):
            asyncio.run(question())


def test_no_replica_is_ended_where_serve_takes_no_size_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler, ended = ServeScaler("app", ("Replica",)), list[str]()
    replica = {"replica_id": "x", "actor_name": "actor", "state": "RUNNING"}
    deployments = {"Replica": {"target_num_replicas": 2, "replicas": [replica]}}

    async def answer(method: str, *arguments: Any) -> Any:
        return {"applications": {"app": {"deployments": deployments, "external_scaler_enabled": False}}}

    scaler._ask = answer  # type: ignore[method-assign]
    monkeypatch.setattr(ServeScaler, "_end", ended.append)
    with pytest.raises(ScalingError, match="'app' needs external_scaler_enabled: true"):
        asyncio.run(scaler.remove(["a/x"]))
    assert ended == []


def test_a_deploy_of_other_deployments_has_another_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller) -> None:
        one, two = (FleetOptions(application="app", deployments=names) for names in (("a",), ("a", "b")))
        first = controller.shard.scaler(one)
        assert controller.shard.scaler(one) is first
        second = controller.shard.scaler(two)
        assert isinstance(second, ServeScaler)
        assert second.deployments == ("a", "b")

    run(scenario, monkeypatch)


@pytest.mark.parametrize(
    "caller", ["replicas/reporter.py", "serving/dispatch/controller_link.py", "controller/shards/keeper.py"]
)
def test_whatever_is_asked_of_a_controller_exists(caller: str) -> None:
    asked = re.findall(r'\bask\(\s*"(\w+)"', (ROOT / caller).read_text().replace("_ask(", "ask("))
    assert len(asked) >= 3
    assert [name for name in asked if not hasattr(Controller, name)] == []


def test_a_start_is_in_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller) -> None:
        await controller.on_start(msgspec.msgpack.encode(Start("a", "engine", 12.0, 0)))
        assert [each["replica"] for each in msgspec.json.decode(await controller.status())["starting"]] == ["a"]

    run(scenario, monkeypatch)


def ping(application: str = "app", deploy: str = "first", version: int = 0, **options: Any) -> tuple[bytes, bytes]:
    """What an ingress of this application and deploy says; ``version`` of its tier table, 0: the first one's."""
    wanted = FleetOptions(application=application, deploy=deploy, **options)
    tiers = table()
    tiers = msgspec.structs.replace(tiers, version=version or tiers.version)
    return msgspec.msgpack.encode(wanted), msgspec.msgpack.encode(tiers)


def test_an_ingress_of_an_earlier_deploy_does_not_bring_its_options_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller) -> None:
        first, second = ping(max_hops=1), ping(deploy="second", max_hops=2)
        numbers = [await controller.configure(*each) for each in (first, second, first)]
        assert numbers == [1, 2, 1]
        assert controller.fleet is not None
        assert controller.fleet.options.max_hops == 2

    run(scenario, monkeypatch)


def test_options_that_come_with_a_newer_table_are_applied_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller) -> None:
        await controller.configure(*ping(version=5, max_hops=1))
        assert controller.fleet is not None
        known = controller.fleet.replicas
        for version, hops, expected in ((5, 2, 1), (6, 3, 3), (5, 1, 3), (6, 4, 3)):
            await controller.configure(*ping(version=version, max_hops=hops))
            assert controller.fleet.options.max_hops == expected, (version, hops)
        assert controller.fleet.tiers.version == 6
        assert controller.fleet.replicas is known, "what it knows is taken over"

    run(scenario, monkeypatch)


def test_another_application_is_told_that_the_controller_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller) -> None:
        await controller.configure(*ping("app"))
        with pytest.raises(ApplicationClash, match=r"fleet.controller_name.*application 'app'; give 'other'"):
            await controller.configure(*ping("other"))
        assert controller.fleet is not None
        assert controller.fleet.options.application == "app"
        controller.upgrade.deploys.pinged_s -= ABANDONED_S
        await controller.configure(*ping("other", "third"))
        assert controller.fleet.options.application == "other", "the first one is gone"

    run(scenario, monkeypatch)


def test_a_fault_does_not_end_the_housekeeping(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = []

    def fails(now_s: float) -> None:
        looks.append(now_s)
        raise KeyError("a fault of ours")

    async def scenario(controller: Controller) -> None:
        monkeypatch.setattr(controller.recalls, "forget", fails)
        await until(lambda: len(looks) > 1)

    monkeypatch.setattr(actor, "SWEEP_S", 0.0)
    run(scenario, monkeypatch)
    assert any(each.exc_info for each in caplog.records), "it is told"


def test_garbage_is_looked_for_when_no_request_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def collected() -> int:
        return int(gc.get_stats()[2]["collections"])

    async def scenario(controller: Controller) -> None:
        controller.fleet, controller.clock = fleet(), lambda: 0.0
        asked = AdmissionRequest("a", 100, 20, Slo(tier="flex", best_effort=True))
        await controller.admit(msgspec.msgpack.encode([asked]))
        before = collected()
        await controller.configure(*ping("", ""))
        assert collected() == before, "it has a place"
        controller.fleet.places.free(request_uid("a"))
        await controller.configure(*ping("", ""))
        assert collected() == before + 1

    thresholds = gc.get_threshold()
    try:
        run(scenario, monkeypatch)
    finally:
        gc.set_threshold(*thresholds)


def test_a_decision_that_fails_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    async def scenario(controller: Controller) -> None:
        controller.fleet, controller.born_s = fleet(), 0.0
        monkeypatch.setattr(controller.fleet, "admit", fails)
        asked = [AdmissionRequest(name, 100, 10, Slo(0.3, 0.03, tier="tight")) for name in ("x", "y")]
        answer = await controller.admit(msgspec.msgpack.encode(asked))
        decided = msgspec.msgpack.decode(answer, type=Admission).decisions
        assert [(d.request_id, d.verdict) for d in decided] == [("x", Verdict.UNCHECKED), ("y", Verdict.UNCHECKED)]

    run(scenario, monkeypatch)
