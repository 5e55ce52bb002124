"""A deploy with other code on a running cluster: two controllers and the keeper follow it, and lose nothing."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.local_stack import change_code, copied_code
from controller.upgrade import CONTROLLER_PACKAGES, code_id
from tests.support.batches_scene import COMPLETIONS, jsonl, line
from tests.support.stack import Stack, running, texts, until, verdict

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

PROMPTS, TOKENS, LINES = [f"line number {i}" for i in range(12)], 500, 200
ARGS: dict[str, Any] = {
    "model": "embedded",
    "profile": "h100_sxm__llama-3.1-8b",
    "engine": {"kind": "simulated", "num_cpus": 0.1, "speed": 0.2, "per_process": 2},
    "fleet": {"num_replicas": 2, "controller_shards": 2},
    "ingress": {"num_replicas": 2, "num_cpus": 0.2},
}


@pytest.fixture(scope="module")
def code() -> Iterator[Path]:
    with copied_code() as folder:
        yield folder


@pytest.fixture(scope="module")
def stack(code: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    batches = {"storage": str(tmp_path_factory.mktemp("batches")), "in_flight": 4}
    with running({**ARGS, "batches": batches}) as up:
        until(lambda: len(up.live()) == 2, 60)
        yield up


def shards(stack: Stack, key: str) -> list[Any]:
    """What each controller tells of itself."""
    return [shard.get(key) for shard in stack.status().get("shards", [])]


def incarnations(stack: Stack, count: int, but: frozenset[str] = frozenset()) -> frozenset[str]:
    """Of so many controllers, none of them ``but``, once a page has all: each ingress has one, which may be older."""
    told: list[Any] = []

    def are_all_there() -> bool:
        told[:] = shards(stack, "incarnation")
        return len(told) == count and all(told) and not but & {*told}

    until(are_all_there, 30, lambda: told)
    return frozenset(told)


def test_a_deploy_with_other_code_is_followed_by_controllers_and_keeper(stack: Stack, code: Path) -> None:
    undisturbed = texts(stack.client, PROMPTS, TOKENS)
    until(lambda: shards(stack, "code") == [code_id(*CONTROLLER_PACKAGES)] * 2, 60)
    before = incarnations(stack, 2)
    lines = [line(str(i), prompt=f"line {i}", max_tokens=24) for i in range(LINES)]
    sent: Any = stack.client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    wanted: Any = {"input_file_id": sent.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    batch_id = stack.client.batches.create(**wanted).id

    changed = copy.deepcopy(stack.document)
    changed["applications"][0]["runtime_env"] = {"env_vars": {"RELEASE": "2"}}  # as docs/deploy.md says
    change_code(code)
    assert texts(stack.client, PROMPTS, TOKENS, lambda: stack.deploy(changed)) == undisturbed

    other = {None, code_id(*CONTROLLER_PACKAGES)}
    until(lambda: len(told := shards(stack, "code")) == 2 and not set(told) & other, 60)
    until(lambda: len(stack.live()) == 2, 60)
    after = incarnations(stack, 2, but=before)
    until(lambda: stack.status()["checkpoints"]["has_taken_over"])  # it has what the last one had learnt
    answer = stack.client.completions.create(model="embedded", prompt="hi", max_tokens=2)
    assert verdict(answer)["admitted"]
    retrieve = stack.client.with_options(max_retries=5).batches.retrieve
    until(lambda: retrieve(batch_id).status == "completed", 120)
    batch: Any = retrieve(batch_id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (LINES, 0)
    told = [json.loads(each) for each in stack.client.files.content(batch.output_file_id).text.splitlines()]
    assert [each["custom_id"] for each in told] == [str(i) for i in range(LINES)]
    assert incarnations(stack, 2) == after, "each is replaced once"
