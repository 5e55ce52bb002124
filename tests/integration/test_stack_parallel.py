"""One replica over two nodes of a local Ray: tensor and pipeline parallelism in a placement group, on timed devices.

Everything but the devices is what GPUs have: Serve's placement group, vLLM's Ray executor, its message queues between
nodes, and as many batches in flight as its pipeline takes.
"""

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
from ray.util import placement_group_table
from ray.util.state import list_actors

from tests.support.stack import Stack, kill_9, running, texts, until, verdict

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ARGS = {
    "profile": "h200_sxm__llama-3.1-8b",
    "engine": {
        "device": "timed",
        "num_cpus": 0.5,
        "speed": 0.5,
        "engine_kwargs": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        "placement_group_bundles": [{"CPU": 0.5}, {"CPU": 0.5}, {"CPU": 0.5}, {"CPU": 0.5}],
        "placement_group_strategy": "SPREAD",
    },
    "fleet": {"num_replicas": 1},
    "ingress": {"num_cpus": 1.5},  # more than the second node has
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(ARGS, cpus=4, second_node_cpus=1) as up:
        yield up


def workers(stack: Stack) -> list[Any]:
    """Live actors that are ranks of an engine."""
    known = list_actors(stack.address, limit=1000)
    return [each for each in known if each.class_name == "TimedWorkerProc" and each.state == "ALIVE"]


def test_the_placement_group_spans_both_nodes_with_a_worker_in_each_bundle(stack: Stack) -> None:
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    assert [(group["strategy"], len(group["bundles"])) for group in groups] == [("SPREAD", 4)]
    nodes = set(groups[0]["bundles_to_node_id"].values())
    assert nodes == {node["NodeID"] for node in ray.nodes()}
    assert groups[0]["bundles"][0]["CPU"] == 1.0, "the replica's own beside its worker's"
    found = workers(stack)
    assert len(found) == 4
    assert {worker.node_id for worker in found} == nodes


def test_requests_are_answered_at_the_pace_of_the_profile(stack: Stack) -> None:
    answer = stack.client.completions.create(
        model="embedded", prompt="Hello", max_tokens=20, extra_headers={"x-slo-tier": "standard"}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert verdict(answer)["admitted"] is True
    prompts = [f"prompt {i}" for i in range(6)]
    together = texts(stack.client, prompts, 30)
    assert [len(text) for text in together] == [30] * 6
    assert together == [texts(stack.client, [prompt], 30)[0] for prompt in prompts], "whatever shares the pipeline"
    stack.settle()


def test_a_worker_that_dies_takes_the_replica_with_it_and_both_are_replaced(stack: Stack) -> None:
    (before,) = stack.live()
    ids = {worker.actor_id for worker in workers(stack)}
    victim = next(worker for worker in workers(stack) if worker.node_id != ray.get_runtime_context().get_node_id())
    assert psutil.pid_exists(victim.pid)
    kill_9(victim.pid)
    until(lambda: [each["replica"] for each in stack.live()] not in ([], [before["replica"]]), 240)
    until(lambda: len(workers(stack)) == 4, 60)
    assert not ids & {worker.actor_id for worker in workers(stack)}
    assert len(texts(stack.client, ["again"], 10)[0]) == 10
