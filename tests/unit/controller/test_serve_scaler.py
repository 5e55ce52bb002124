"""The size through Serve: a replica is taken off the number only once Serve knows of its end."""

import asyncio
from typing import Any

import pytest

from controller import serve_scaler
from controller.serve_scaler import ServeScaler


@pytest.mark.parametrize("state", ["RUNNING", "UPDATING", "RECOVERING", "PENDING_MIGRATION"])
def test_serve_is_asked_for_less_only_once_it_has_noticed_whatever_it_does_meanwhile(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Of two that it takes for alive, Serve would stop the newest: one that has not ended."""
    monkeypatch.setattr(serve_scaler, "POLL_S", 0.0)
    scaler, ended = ServeScaler("app", ("Replica",)), list[str]()
    asked, looks = list[tuple[int, str]](), iter([state] * 5 + ["STOPPING"] * 5)  # it notices at the sixth look

    async def answer(method: str, *arguments: Any) -> Any:
        told = next(looks)
        if method == "update_deployment_replicas":
            asked.append((arguments[1], told))
        replicas = [{"replica_id": "x", "actor_name": "x", "state": told}]
        deployments = {"Replica": {"target_num_replicas": 2, "replicas": replicas}}
        application = {"deployments": deployments, "external_scaler_enabled": True, "last_deployed_time_s": 0.0}
        return {"applications": {"app": application}}

    scaler._ask = answer  # type: ignore[method-assign]
    monkeypatch.setattr(ServeScaler, "_end", ended.append)
    asyncio.run(scaler.remove(["g/x"]))
    assert ended == ["x"]
    assert asked == [(1, "STOPPING")]
