"""The whole stack over real HTTP, Serve and Ray, on simulated engines (three H100s' worth in real time)."""

import copy
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.support import plain_http
from tests.support.stack import TIERS, Stack, kill_9, processes, running, texts, until, verdict

pytestmark = pytest.mark.integration

ARGS: dict[str, Any] = {
    "model": "embedded",
    "engine": {"kind": "simulated", "num_cpus": 0.1, "max_num_seqs": 128, "max_num_batched_tokens": 8192},
    "profile": "h100_sxm__llama-3.1-8b",
    "fleet": {"num_replicas": 3, "stall_timeout_s": 6.0},
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(ARGS) as up:
        yield up


def post(stack: Stack, body: dict, headers: dict | None = None, path: str = "completions") -> httpx.Response:
    return plain_http.post(f"{stack.url}/v1/{path}", json={"model": "embedded", **body}, headers=headers, timeout=60)


def test_openai_sdk_whole_and_streamed_with_slo_in_body_and_headers(stack: Stack) -> None:
    client = stack.client
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
    whole = client.chat.completions.create(
        model="embedded", messages=messages, max_tokens=8, extra_body={"slo": {"ttft_ms": 4000, "tpot_ms": 400}}
    )
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert verdict(whole)["admitted"] is True
    chunks = list(
        client.chat.completions.create(
            model="embedded",
            messages=messages,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-slo-tier": "interactive"},
        )
    )
    assert {chunk.service_tier for chunk in chunks} == {"default"}
    verdicts = [verdict(chunk) for chunk in chunks if "slo" in (chunk.model_extra or {})]
    assert len(verdicts) == 1
    assert verdicts[0]["predicted_ttft_ms"] > 0
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_every_generating_endpoint_answers_with_its_verdict(stack: Stack) -> None:
    answers = {
        "responses": post(stack, {"input": "hi", "max_output_tokens": 4, "service_tier": "flex"}, path="responses"),
        "messages": post(stack, {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}, path="messages"),
        "completions": post(stack, {"prompt": "hi", "max_tokens": 4, "n": 2}),
    }
    for name, answer in answers.items():
        assert answer.status_code == 200, f"{name}: {answer.text}"
        assert answer.json()["slo"]["admitted"] is True, name
    assert answers["responses"].json()["service_tier"] == "flex"
    assert len(answers["completions"].json()["choices"]) == 2


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"slo": {"ttft_ms": -1}}, {}, "slo.ttft_ms"),
        ({}, {"x-slo-tpot-ms": "nan"}, "x-slo-tpot-ms"),
        ({"slo": {"ttft": 3}}, {}, "slo.ttft"),
        ({"service_tier": "platinum"}, {}, "service_tier"),
        ({"service_tier": "flex"}, {"x-slo-ttft-ms": "100"}, "x-slo-ttft-ms"),
    ],
)
def test_a_bad_objective_is_a_400_that_names_the_field(stack: Stack, body: dict, headers: dict, param: str) -> None:
    answer = post(stack, {"prompt": "hi", "max_tokens": 4, **body}, headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_vllms_own_errors_come_in_openais_shape(stack: Stack) -> None:
    unknown = post(stack, {"model": "nope", "prompt": "hi"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    long = post(stack, {"prompt": [70] * 5000, "max_tokens": 4})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    broken = plain_http.post(f"{stack.url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400


def test_what_cannot_hold_is_refused_with_reason_and_in_shape(stack: Stack) -> None:
    answer = post(stack, {"prompt": [70] * 3000, "max_tokens": 4}, {"x-slo-tier": "interactive", "x-slo-ttft-ms": "2"})
    assert answer.status_code == 429
    assert answer.headers["x-slo-reason"] == "ttft_unattainable"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    streamed = post(
        stack,
        {"prompt": [70] * 3000, "max_tokens": 4, "stream": True},
        {"x-slo-tier": "interactive", "x-slo-ttft-ms": "2"},
    )
    assert streamed.status_code == 429, "a stream that never begins still has a status"
    with pytest.raises(openai.RateLimitError):
        stack.client.responses.create(
            model="embedded",
            input="hi" * 1000,
            extra_headers={"x-slo-tier": "interactive", "x-slo-ttft-ms": "2"},
            stream=True,
        )


def test_standard_falls_back_to_best_effort_and_says_so(stack: Stack) -> None:
    answer = post(stack, {"prompt": [70] * 3000, "max_tokens": 4}, {"x-slo-tier": "standard", "x-slo-ttft-ms": "2"})
    slo = answer.json()["slo"]
    assert (slo["admitted"], slo["met"], slo["tier"]) == (False, False, "batch")
    assert (answer.json()["service_tier"], answer.headers["x-slo-tier"]) == ("flex", "batch")
    assert answer.headers["x-slo-promised"] == "false"


def abandoned(stack: Stack) -> int:
    """Requests of the standard tier whose clients left."""
    return int(stack.status()["attainment"].get("standard", {}).get("abandoned", 0))


def is_idle(stack: Stack) -> bool:
    return all(replica["requests"] == 0 for replica in stack.status()["replicas"])


def test_a_client_that_leaves_frees_replica_and_reservation(stack: Stack) -> None:
    stack.settle()
    before = abandoned(stack)
    with stack.client.completions.create(
        model="embedded", prompt="hi", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        until(lambda: sum(replica["requests"] for replica in stack.status()["replicas"]) == 1)
    until(lambda: is_idle(stack), 10)  # of 22 s of decoding
    until(lambda: abandoned(stack) > before, 5)  # told by the ingress, not the replica
    assert abandoned(stack) == before + 1


def test_a_client_that_leaves_before_its_answer_frees_all_and_the_proxy_rests(stack: Stack) -> None:
    stack.settle()
    before = abandoned(stack)
    body = {"model": "embedded", "prompt": "hi", "max_tokens": 3000, "ignore_eos": True}
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            plain_http.post(f"{stack.url}/v1/completions", json=body, timeout=1.5)
    until(lambda: is_idle(stack), 10)  # of 22 s of decoding
    until(lambda: abandoned(stack) == before + 3, 5)
    proxies = [p for p in processes("haproxy") if p.name() == "haproxy"]
    assert proxies
    before_s, watched_s = sum(sum(p.cpu_times()[:2]) for p in proxies), 2.0
    time.sleep(watched_s)  # a share of a core, over this time
    assert sum(sum(p.cpu_times()[:2]) for p in proxies) - before_s < 0.2 * watched_s


def test_a_new_tier_table_is_applied_in_place_while_streams_run(stack: Stack) -> None:
    pids = sorted(replica["pid"] for replica in stack.live())
    scaled = {"name": "scaled", "ttft_slowdown": 50, "tpot_ms": 800}
    tiers = [*TIERS[:2], scaled, {"name": "patient", "ttft_ms": 60000, "tpot_ms": 1000}, TIERS[2]]

    def redeploy() -> None:
        stack.deploy(stack.retiered(tiers, 2))
        until(lambda: stack.status()["version"] == 2)

    served = texts(stack.client, [f"prompt {i}" for i in range(6)], 400, redeploy)
    assert {len(text) for text in served} == {400}
    assert sorted(replica["pid"] for replica in stack.live()) == pids
    assert post(stack, {"prompt": "hi", "max_tokens": 2}, {"x-slo-tier": "patient"}).json()["slo"]["tier"] == "patient"
    prompts = [[70] * tokens for tokens in (50, 3000)]
    short, long = (post(stack, {"prompt": p, "max_tokens": 2}, {"x-slo-tier": "scaled"}).json()["slo"] for p in prompts)
    assert 0 < short["target_ttft_ms"] < long["target_ttft_ms"] < 60000
    assert long["admitted"]
    assert long["met"] == (long["ttft_ms"] <= long["target_ttft_ms"])
    stack.deploy(stack.retiered(TIERS[1:], 2))  # not newer: refused, and said so
    until(lambda: "raise it above 2" in stack.status().get("tier_table_error", ""))
    assert [tier["name"] for tier in stack.status()["tiers"]] == [
        "interactive",
        "standard",
        "scaled",
        "patient",
        "batch",
    ]


def test_settings_of_the_fleet_are_applied_in_place(stack: Stack) -> None:
    before = stack.status()
    pids = sorted([replica["pid"] for replica in before["replicas"]] + [before["controller"]["pid"]])
    size = len(before["replicas"])
    changed = stack.retiered(TIERS, 3)
    table = changed["applications"][0]["deployments"][0]["user_config"]
    table["fleet"] = {"routing": "round_robin", "autoscaling": {"min_replicas": size, "max_replicas": size}}
    stack.deploy(changed)
    until(lambda: stack.status()["routing"] == "round_robin")
    assert stack.status()["allocation"]["size"], "the fleet's size follows the load now"
    assert post(stack, {"prompt": "hi", "max_tokens": 2}).json()["slo"]["admitted"]
    del table["fleet"]
    stack.deploy(stack.retiered(TIERS, 4))
    until(lambda: stack.status()["routing"] == before["routing"])
    after = stack.status()
    assert sorted([replica["pid"] for replica in after["replicas"]] + [after["controller"]["pid"]]) == pids


def test_streams_survive_the_death_of_a_replica_and_of_the_controller(stack: Stack) -> None:
    prompts = [f"story number {i}" for i in range(12)]
    undisturbed = texts(stack.client, prompts, 300)
    controller = stack.status()["controller"]

    victim = stack.live()[0]["pid"]

    def disturb() -> None:
        kill_9(victim)
        kill_9(controller["pid"])

    assert texts(stack.client, prompts, 300, disturb) == undisturbed
    until(lambda: len(pids := {r["pid"] for r in stack.live()}) == 3 and victim not in pids, 90)
    assert stack.status()["controller"]["incarnation"] != controller["incarnation"]
    assert stack.status()["tiers"][0]["name"] == "interactive"


def test_metrics_carry_our_names(stack: Stack) -> None:
    text = plain_http.get(f"{stack.url}/metrics", timeout=10).text
    for name in (
        "request_ttft_seconds",
        "request_tpot_seconds",
        "slo_met_total",
        "rejected_total",
        "replicas",
        "replicas_target",
        "kv_tokens",
    ):
        assert f"polyslo_{name}" in text
    assert json.dumps("embedded")[1:-1] in text


def test_changed_args_reach_the_controller_whatever_the_tables_version(stack: Stack) -> None:
    changed = copy.deepcopy(stack.document)
    application = changed["applications"][0]
    application["args"]["fleet"]["routing"] = "sequential"
    application["deployments"][0]["user_config"] |= {"version": 1, "tiers": TIERS[1:], "default_tier": "standard"}
    with ThreadPoolExecutor(1) as pool:
        deployed = pool.submit(stack.deploy, changed)
        answers = [post(stack, {"prompt": "hi", "max_tokens": 2}).status_code]
        while not deployed.done():
            answers.append(post(stack, {"prompt": "hi", "max_tokens": 2}).status_code)
            time.sleep(0.1)
        deployed.result()
    assert set(answers) == {200}, "the new ingress takes requests before the old one takes none"
    until(lambda: stack.status()["routing"] == "sequential", 90)
    assert [tier["name"] for tier in stack.status()["tiers"]] == ["standard", "batch"]
    until(lambda: len(stack.live()) == ARGS["fleet"]["num_replicas"], 90)
    assert post(stack, {"prompt": "hi", "max_tokens": 2}).json()["slo"]["tier"] == "standard"
