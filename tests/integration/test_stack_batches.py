"""Batches on the whole stack: real Ray, Serve and HTTP, simulated engines. Keeper and ingress die meanwhile."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.batches_scene import COMPLETIONS, jsonl, line
from tests.support.stack import Stack, kill_9, processes, running, until, verdict

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LINES = 240


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    args: dict[str, Any] = {
        "model": "embedded",
        "profile": "h100_sxm__llama-3.1-8b",
        "engine": {"kind": "simulated", "num_cpus": 0.1, "speed": 0.1, "per_process": 2},
        "fleet": {"num_replicas": 2},
        "ingress": {"num_replicas": 2, "num_cpus": 0.2},
        "batches": {"storage": str(tmp_path_factory.mktemp("batches")), "in_flight": 4},
    }
    with running(args) as started:
        yield started


def batch_of(stack: Stack, *lines: dict[str, Any]) -> str:
    file: Any = stack.client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    wanted: Any = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    return str(stack.client.batches.create(**wanted).id)


def told(stack: Stack, batch_id: str) -> Any:
    """The batch, or None while its keeper starts anew."""
    try:
        return stack.client.batches.retrieve(batch_id)
    except (openai.InternalServerError, openai.APIConnectionError):
        return None


def completed(stack: Stack, batch_id: str) -> int:
    batch = told(stack, batch_id)
    return 0 if batch is None else int(batch.request_counts.completed)


def test_a_batch_ends_whole_while_its_keeper_and_an_ingress_die(stack: Stack) -> None:
    batch_id = batch_of(stack, *(line(str(i), prompt=f"line {i}", max_tokens=24) for i in range(LINES)))
    until(lambda: completed(stack, batch_id) >= LINES // 8, 60)
    (keeper,) = processes("ray::Keeper")
    kill_9(keeper.pid)
    until(lambda: completed(stack, batch_id) >= LINES // 4, 60)
    (victim, _) = processes("ray::ServeReplica:polyslo:Ingress")
    kill_9(victim.pid)
    answer = stack.client.with_options(max_retries=5).completions.create(model="embedded", prompt="hi", max_tokens=2)
    assert verdict(answer)["admitted"], "a request with an objective goes first"
    until(lambda: (batch := told(stack, batch_id)) is not None and batch.status == "completed", 120)
    batch = told(stack, batch_id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (LINES, 0)
    lines = [json.loads(each) for each in stack.client.files.content(batch.output_file_id).text.splitlines()]
    assert [each["custom_id"] for each in lines] == [str(i) for i in range(LINES)]
    bodies = [each["response"]["body"] for each in lines]
    assert {body["usage"]["completion_tokens"] for body in bodies} == {24}
    assert {body["service_tier"] for body in bodies} == {"flex"}
