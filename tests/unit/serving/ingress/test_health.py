"""Health of an ingress that hears no replica, or no controller."""

from typing import Any

import pytest

from tests.unit.serving.ingress.test_ingress_app import TABLE, Scene, play, told


@pytest.mark.parametrize(("min_replicas", "health"), [(1, 503), (0, 200)])
@pytest.mark.parametrize("controller", [None, [], [told("a", live=False)]])
def test_a_fleet_without_replicas_is_unhealthy_unless_it_may_be_empty(
    controller: list[Any] | None, min_replicas: int, health: int
) -> None:
    async def script(scene: Scene) -> None:
        scene.transport.replicas = controller
        assert (await scene.get("/health"))[0] == health

    play(script, autoscaling={"min_replicas": min_replicas, "max_replicas": 3})


def test_a_tier_table_says_whether_a_fleet_may_be_empty() -> None:
    async def script(scene: Scene) -> None:
        for version, min_replicas, health in ((1, 0, 200), (2, 1, 503)):
            scene.ingress_app.set_table(
                {**TABLE, "version": version, "fleet": {"autoscaling": {"min_replicas": min_replicas}}}
            )
            assert not scene.ingress_app.table_error
            assert (await scene.get("/health"))[0] == health

    play(script, autoscaling={"max_replicas": 3})


def test_a_silent_controller_is_waited_for_by_no_probe_and_asked_once_by_those_who_read_the_status() -> None:
    async def script(scene: Scene) -> None:
        await scene.begin()
        asked = list[None]()

        async def status() -> dict[str, Any]:
            asked.append(None)
            raise TimeoutError("it is silent")

        scene.transport.status = status  # type: ignore[method-assign]
        assert (await scene.get("/health"))[0] == 200
        assert not asked
        scene.ingress_app._status_s = float("-inf")
        for _ in range(2):
            assert "it is silent" in (await scene.ingress_app.status())["error"]
        assert len(asked) == 1

    play(script)
