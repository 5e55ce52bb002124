"""The whole stack on two vLLM engines: exact tokens through every kind of death.

Over the embedded model, and over timed devices at a fifth of the speed of an H200, slow enough to die in mid-stream.
What has to do with tokens alone runs on both, the others on one of them: replacing an engine takes half a minute.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.support import plain_http
from tests.support.stack import Stack, has_not_ended, kill_9, running, texts, until

pytestmark = [pytest.mark.integration, pytest.mark.alone]

FLEET = {"num_replicas": 2, "stall_timeout_s": 20.0}
ARGS: dict[str, dict[str, Any]] = {
    "cpu": {"model": "embedded", "engine": {"kind": "vllm", "num_cpus": 0.5, "kv_cache_gib": 0.1}, "fleet": FLEET},
    "timed": {
        "profile": "h200_sxm__llama-3.1-8b",
        "engine": {"device": "timed", "num_cpus": 0.5, "speed": 0.2},
        "fleet": FLEET,
    },
}
PROMPTS = [f"Tell me story number {i}, please: " * (1 + i % 3) for i in range(12)]


@pytest.fixture(scope="module", params=ARGS)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def stack(device: str) -> Iterator[Stack]:
    with running(ARGS[device]) as up:
        yield up


ON_CPU, ON_TIMED = (pytest.mark.parametrize("device", [name], indirect=True, scope="module") for name in ARGS)


@ON_CPU  # time is the profile's on a timed device
def test_replicas_know_how_fast_they_are_before_the_first_request(stack: Stack) -> None:
    for replica in stack.live():
        assert replica["drift"]["observations"] >= 32
        assert replica["engine"]["prompt_tokens"] == replica["engine"]["generation_tokens"] == 0


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[str]:
    return texts(stack.client, PROMPTS, 120)


def test_streams_and_whole_answers_are_the_same_text(stack: Stack, undisturbed: list[str]) -> None:
    whole = stack.client.completions.create(
        model="embedded", prompt=PROMPTS[3], max_tokens=120, temperature=0, extra_body={"ignore_eos": True}
    )
    assert whole.choices[0].text == undisturbed[3]
    assert len(set(undisturbed)) > 6, "the model's output depends on its prompt"


@ON_CPU  # a timed device computes no logits
def test_logprobs_and_stop_strings_come_from_the_engine(stack: Stack, undisturbed: list[str]) -> None:
    stop = undisturbed[0][10:12]
    answer = stack.client.completions.create(
        model="embedded", prompt=PROMPTS[0], max_tokens=120, temperature=0, logprobs=2, stop=[stop]
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert undisturbed[0].startswith(choice.text)
    assert stop not in choice.text
    assert choice.logprobs is not None
    assert len(choice.logprobs.token_logprobs or []) >= len(choice.text)


@ON_CPU  # a timed device computes no logits
def test_constrained_answers_parse_and_leave_free_ones_alone(stack: Stack, undisturbed: list[str]) -> None:
    """A random model says nothing that parses unless every one of its tokens is held to the grammar."""
    order = r'\{"size":"(small|large)","express":(true|false)\}'

    def ask(index: int) -> str:
        constraint = {"structured_outputs": {"regex": order}}
        answer = stack.client.chat.completions.create(
            model="embedded",
            messages=[{"role": "user", "content": PROMPTS[index]}],
            max_tokens=100,
            temperature=0,
            extra_body=constraint,
        )
        assert answer.choices[0].finish_reason == "stop"
        return str(answer.choices[0].message.content)

    with ThreadPoolExecutor(6) as pool:
        constrained: list[Future[str]] = []
        free = texts(stack.client, PROMPTS, 120, lambda: constrained.extend(pool.submit(ask, i) for i in range(6)))
        answers = [json.loads(answer.result(120)) for answer in constrained]
    assert free == undisturbed
    assert all(answer["size"] in ("small", "large") for answer in answers)
    assert all(isinstance(answer["express"], bool) for answer in answers)


@ON_CPU
def test_a_client_that_lost_its_connection_gets_the_rest(stack: Stack, undisturbed: list[str]) -> None:
    """Sampled output, which cannot be computed again: the engine goes on, and its replica keeps the tokens."""
    body = {"model": "embedded", "prompt": PROMPTS[0], "max_tokens": 120, "temperature": 1, "stream": True}
    body |= {"ignore_eos": True}
    first, last_id = broken_off(stack, body, events=10)
    time.sleep(1.0)  # tokens that nobody reads
    rest, resumed = "", None
    with plain_http.stream(
        "POST", f"{stack.url}/v1/completions", json=body, headers={"last-event-id": last_id}, timeout=60
    ) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                rest += event["choices"][0]["text"] if event["choices"] else ""
                resumed = event.get("slo", {}).get("resumed", resumed)
    assert first
    assert len(first + rest) == 120
    assert resumed == 1


def broken_off(stack: Stack, body: dict[str, Any], events: int) -> tuple[str, str]:
    """Text and id of the last of so many events of a stream whose client then leaves."""
    text, last_id = "", ""
    with plain_http.stream(
        "POST", f"{stack.url}/v1/completions", json=body, headers={"x-stream-resume": "1"}, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        while events:
            line = next(lines)
            if line.startswith("id: "):
                next_id = line.removeprefix("id: ")
            elif line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                last_id, events = next_id, events - 1
    return text, last_id


@ON_CPU
def test_killing_a_replica_and_the_controller_changes_no_token(stack: Stack, undisturbed: list[str]) -> None:
    """Both at once, in the middle of 12 streams; the replica's engine process goes with it."""
    status = stack.status()
    victim = max(stack.live(), key=lambda replica: replica["requests"])
    engine = psutil.Process(victim["pid"]).children(recursive=True)

    def disturb() -> None:
        kill_9(victim["pid"])
        kill_9(status["controller"]["pid"])

    assert texts(stack.client, PROMPTS, 120, disturb) == undisturbed
    until(lambda: not any(map(has_not_ended, engine)), 20)
    until(lambda: len(pids := {r["pid"] for r in stack.live()}) == 2 and victim["pid"] not in pids, 240)
    assert stack.status()["controller"]["incarnation"] != status["controller"]["incarnation"]


def engines(stack: Stack) -> list[psutil.Process]:
    """The engine processes of the replicas that are live now; the title that vLLM gives them is sometimes missing."""
    found = []
    for replica in stack.live():
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(replica["pid"]).children(recursive=True)
            found += [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    return found


@ON_TIMED
def test_killing_an_engine_alone_changes_no_token(stack: Stack, undisturbed: list[str]) -> None:
    """The actor lives on, its engine does not: the health check has it replaced."""
    # a replica may have been replaced since the last test
    until(lambda: len(engines(stack)) == 2, 240, lambda: (stack.live(), psutil.Process().children(recursive=True)))
    before = {replica["pid"] for replica in stack.live()}
    victim = engines(stack)[0]
    assert texts(stack.client, PROMPTS, 120, lambda: kill_9(victim.pid)) == undisturbed
    until(lambda: len(stack.live()) == 2 and {r["pid"] for r in stack.live()} != before, 240)


@ON_TIMED
def test_vllms_own_benchmark_runs_against_it_unchanged(stack: Stack) -> None:
    model = plain_http.get(f"{stack.url}/v1/models", timeout=10).json()["data"][0]
    command = "serve --backend openai-chat --endpoint /v1/chat/completions --dataset-name random --num-prompts 6"
    command += (
        " --random-input-len 40 --random-output-len 12 --goodput ttft:20000 tpot:2000 --header x-slo-tier=standard"
    )
    arguments = [*command.split(), "--base-url", stack.url, "--model", model["id"], "--tokenizer", model["root"]]
    done = subprocess.run(
        [sys.executable, "-m", "serving.cli.commands", "bench", *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Successful requests:                     6" in done.stdout
