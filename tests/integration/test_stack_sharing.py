"""Two models on a cluster that has no room for the most of both: what one fleet gives back, the other takes."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stack import Stack, running, until, verdict

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SCALING: dict[str, Any] = {
    "max_replicas": 2,
    "target_utilization": 0.001,  # so that any request at all is demand for a second replica
    "look_back_period_s": 5.0,
    "upscale_cooldown_s": 2.0,
    "downscale_cooldown_s": 2.0,
    "downscale_delay_s": 6.0,
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Room for three replicas of one core each, of which ``chat`` begins with two."""
    engine = {"kind": "simulated", "num_cpus": 1.0}
    models = [{"name": "chat", "fleet": {"num_replicas": 2}}, {"name": "code", "fleet": {"num_replicas": 1}}]
    args = {"engine": engine, "profile": "h100_sxm__llama-3.1-8b", "fleet": {"autoscaling": SCALING}, "models": models}
    with running(args | {"ingress": {"num_cpus": 0.5}}, cpus=4, external_scaler_enabled=True) as started:
        yield started


class Load:
    """Requests for one model, one after the other, as long as the block lasts; ``answers`` has their verdicts."""

    def __init__(self, stack: Stack, model: str) -> None:
        self.answers: list[dict[str, Any]] = []
        self._stack, self._model, self._over = stack, model, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            told = self._stack.client.completions.create(model=self._model, prompt=[70] * 400, max_tokens=20)
            self.answers.append(verdict(told))

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)


def live(stack: Stack, model: str) -> int:
    return sum(replica["model"] == model for replica in stack.live())


def size(stack: Stack, model: str) -> dict[str, Any]:
    page = next(page for page in stack.status()["models"] if page["model"] == model)
    return dict(page["allocation"]["size"])


def test_room_that_an_idle_model_gives_back_goes_to_a_busy_one(stack: Stack) -> None:
    for busy, idle in (("code", "chat"), ("chat", "code")):
        with Load(stack, busy) as load:
            until(lambda model=busy: size(stack, model)["target"] == 2, 60)  # type: ignore[misc]
            until(lambda model=busy: live(stack, model) == 2, 120)  # type: ignore[misc]
            assert live(stack, idle) == 1, "its minimum"
            until(lambda model=busy: not size(stack, model)["without_room"], 30)  # type: ignore[misc]
        assert load.answers
        assert all(answer["met"] for answer in load.answers)
    assert not any(page["scaling_error"] for page in stack.status()["models"])
