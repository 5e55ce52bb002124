"""The size through Serve: a replica is taken off the number only once Serve knows of its end."""

import asyncio
from typing import Any

import pytest

from controller import serve_scaler
from controller.serve_scaler import ScalingError, ServeScaler

Look = tuple[int, float, dict[str, str]]  # replicas asked for, time of the last deploy, states by id


class FakeServe(ServeScaler):
    """Serve, which tells another of these looks each time, the last one again and again."""

    def __init__(self, *looks: Look) -> None:
        super().__init__("app", ("Replica",))
        self.looks, self.at = looks, 0
        self.ended: list[str] = []
        self.asked: list[tuple[int, int]] = []  # replicas, and the look at which they were asked for

    async def _ask(self, method: str, *arguments: Any) -> Any:
        if method == "update_deployment_replicas":
            self.asked.append((arguments[1], self.at))
            return None
        replicas, deployed_s, states = self.looks[min(self.at, len(self.looks) - 1)]
        self.at += 1
        told = [{"replica_id": own_id, "actor_name": own_id, "state": state} for own_id, state in states.items()]
        deployments = {"Replica": {"target_num_replicas": replicas, "replicas": told}}
        application = {"deployments": deployments, "external_scaler_enabled": True, "last_deployed_time_s": deployed_s}
        return {"applications": {"app": application}}

    def _end(self, actor_name: str) -> None:  # type: ignore[override]
        self.ended.append(actor_name)


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_scaler, "POLL_S", 0.0)


@pytest.mark.parametrize("state", ["RUNNING", "UPDATING", "RECOVERING", "PENDING_MIGRATION"])
def test_serve_is_asked_for_less_only_once_it_has_noticed_whatever_it_does_meanwhile(state: str) -> None:
    """Of two that it takes for alive, Serve would stop the newest: one that has not ended."""
    looks: list[Look] = [(2, 0.0, {"x": state})] * 5 + [(2, 0.0, {"x": "STOPPING"})]  # it notices at the sixth look
    serve = FakeServe(*looks)
    assert asyncio.run(serve.remove(["g/x"])) == ["g/x"]
    assert serve.ended == ["x"]
    (asked,) = serve.asked
    assert asked[0] == 1
    assert asked[1] >= 6


def test_of_several_replicas_those_that_serve_knows_are_ended_though_it_has_forgotten_another() -> None:
    both = {"x": "RUNNING", "z": "RUNNING"}
    serve = FakeServe((5, 0.0, both), (5, 0.0, both), (5, 0.0, {}))
    assert asyncio.run(serve.remove(["g/x", "g/y", "g/z"])) == ["g/x", "g/z"]
    assert serve.ended == ["x", "z"]
    assert [count for count, _ in serve.asked] == [3]


def test_nothing_is_asked_of_a_serve_that_knows_none_of_them() -> None:
    serve = FakeServe((5, 0.0, {"x": "RUNNING"}))
    with pytest.raises(ScalingError, match="knows no replica g/y, g/z"):
        asyncio.run(serve.remove(["g/y", "g/z"]))
    assert (serve.ended, serve.asked) == ([], [])


def test_a_deploy_that_comes_while_serve_notices_an_end_is_not_asked_for_less_than_it_configures() -> None:
    """It has reset the size: what is left of that would look like another configured number."""
    before: Look = (6, 1.0, {"x": "RUNNING"})
    serve = FakeServe(before, before, before, before, (2, 2.0, {}))
    assert asyncio.run(serve.remove(["g/x"])) == ["g/x"]
    assert serve.ended == ["x"]
    assert serve.asked == []


def test_a_deploy_that_nobody_has_seen_yet_is_not_asked_for_less_than_it_configures() -> None:
    """It came after the size was asked, as while the leader of several controllers ended another one's replicas."""
    after: Look = (2, 2.0, {"x": "RUNNING"})
    serve = FakeServe((6, 1.0, {"x": "RUNNING", "y": "RUNNING"}), after, after, (2, 2.0, {}))

    async def removed() -> None:
        assert (await serve.size()).replicas == 6
        assert await serve.remove(["g/x"]) == ["g/x"]

    asyncio.run(removed())
    assert serve.ended == ["x"]
    assert serve.asked == []
