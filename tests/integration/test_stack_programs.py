"""Agent programs on the whole stack: one that fits no KV cache beside another waits, and is promised in time."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support import plain_http
from tests.support.stack import Stack, running, until

pytestmark = pytest.mark.integration

ARGS: dict[str, Any] = {
    "model": "embedded",
    "engine": {"kind": "simulated", "num_cpus": 0.1, "kv_capacity_tokens": 4000},
    "profile": "h100_sxm__llama-3.1-8b",
    "fleet": {"num_replicas": 1},
}
DEADLINE_MS = 600_000
PROMPT = "x" * 2500  # tokens are bytes: two conversations do not fit


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(ARGS) as up:
        yield up


def ask(stack: Stack, program: str, is_last: bool = False) -> dict[str, Any]:
    """One call of a program, and what it was told of it."""
    told = {"id": program, "app": "agent", "deadline_ms": DEADLINE_MS, "last": is_last}
    body = {"model": "embedded", "prompt": PROMPT, "max_tokens": 4, "slo": {"program": told}}
    answer = plain_http.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["slo"]["program"]
    return found


def programs(stack: Stack) -> dict[str, Any]:
    return dict(stack.status()["programs"])


def test_a_program_waits_for_a_place_and_is_promised_then(stack: Stack) -> None:
    while programs(stack)["known_graphs"] < 4:  # until it is known what a deadline is worth in this application
        assert ask(stack, f"earlier-{uuid.uuid4().hex}", is_last=True)["promised"]
    until(lambda: programs(stack)["open"] == 0)
    assert ask(stack, "first")["promised"]
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(ask, stack, "second")
        until(lambda: programs(stack)["waiting"] == 1 or second.done())
        assert not second.done(), second.result()
        assert ask(stack, "first", is_last=True)["promised"], "it has its place"
        assert second.result(timeout=60)["promised"]
    until(lambda: programs(stack)["waiting"] == 0)
    kept = programs(stack)["kept"]
    assert ask(stack, "second", is_last=True)["promised"]
    until(lambda: programs(stack)["kept"] == kept + 1)
