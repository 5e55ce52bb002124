"""Two ingresses, replicas that share processes, one controller and then several: who dies takes only his own along."""

import contextlib
import copy
import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import openai
import psutil
import pytest

from serving.launch.dashboard import serve_client
from tests.support import plain_http
from tests.support.stack import Stack, kill_9, processes, running, texts, until, verdict

pytestmark = pytest.mark.integration

PROCESSES, PER_PROCESS = 2, 3
REPLICAS = PROCESSES * PER_PROCESS
ARGS: dict[str, Any] = {
    "model": "embedded",
    "engine": {"kind": "simulated", "num_cpus": 0.1, "per_process": PER_PROCESS},
    "profile": "h100_sxm__llama-3.1-8b",
    "fleet": {"num_replicas": REPLICAS, "stall_timeout_s": 6.0, "routing": "round_robin"},
    "ingress": {"num_replicas": 2, "num_cpus": 0.2},
}
PROMPTS, TOKENS = [f"line number {i}" for i in range(16)], 400


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(ARGS) as up:
        until(lambda: len(up.live()) == REPLICAS, 60)
        yield up


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[str]:
    served = texts(stack.client, PROMPTS, TOKENS)
    assert {len(text) for text in served} == {TOKENS}
    return served


def ingresses() -> list[psutil.Process]:
    """Processes that serve HTTP, or start to."""
    return processes(":Ingress")


def two_serve(stack: Stack) -> bool:
    """Whether there are two ingresses and both have started: importing vLLM takes one of them long."""
    deployments = serve_client(stack.address).get_serve_details()["applications"]["polyslo"]["deployments"]
    states = [replica["state"] for replica in deployments["Ingress"]["replicas"]]
    return len(ingresses()) == 2 and states == ["RUNNING"] * 2


def played(stack: Stack, disturb: Any) -> list[tuple[str, BaseException | None]]:
    """All prompts as concurrent streams: the text of each until its end, and the error that ended it, if any."""
    results: list[tuple[str, BaseException | None]] = [("", None)] * len(PROMPTS)
    begun = [threading.Event() for _ in PROMPTS]

    def stream(index: int) -> None:
        text, error = "", None
        try:
            for chunk in stack.client.completions.create(
                model="embedded",
                prompt=PROMPTS[index],
                max_tokens=TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                text += chunk.choices[0].text if chunk.choices else ""
                begun[index].set()
        except Exception as caught:
            error = caught
        begun[index].set()
        results[index] = (text, error)

    threads = [threading.Thread(target=stream, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    assert all(event.wait(90) for event in begun)
    disturb()
    for thread in threads:
        thread.join(180)
        assert not thread.is_alive()
    return results


def test_replicas_that_share_a_process_have_names_and_reports_of_their_own(
    stack: Stack, undisturbed: list[str]
) -> None:
    names = {replica["replica"] for replica in stack.live()}
    assert len(names) == REPLICAS
    assert {name.rpartition(".")[2] for name in names} == {str(number) for number in range(PER_PROCESS)}
    assert len({replica["pid"] for replica in stack.live()}) == PROCESSES
    served_by = {
        stack.client.completions.create(model="embedded", prompt=f"{i}", max_tokens=2).model_extra["slo"]["replica"]  # type: ignore[index]
        for i in range(4 * REPLICAS)
    }
    assert served_by == names


def test_streams_of_a_process_that_dies_continue_in_the_other(stack: Stack, undisturbed: list[str]) -> None:
    victim = stack.live()[0]["pid"]
    assert texts(stack.client, PROMPTS, TOKENS, lambda: kill_9(victim)) == undisturbed
    until(lambda: len(live := stack.live()) == REPLICAS and victim not in {r["pid"] for r in live}, 90)


def test_an_ingress_that_dies_ends_its_streams_clearly_and_leaves_nothing(stack: Stack, undisturbed: list[str]) -> None:
    stack.settle()
    before = ingresses()
    assert len(before) == 2
    results = played(stack, lambda: kill_9(before[0].pid))
    broken = [index for index, (_, error) in enumerate(results) if error is not None]
    whole = [index for index in range(len(PROMPTS)) if index not in broken]
    assert broken, "the ingress that died had streams"
    assert whole, "so had the other one"
    assert [results[index][0] for index in whole] == [undisturbed[index] for index in whole]
    for index in broken:
        text, error = results[index]
        assert undisturbed[index].startswith(text)
        assert not isinstance(error, openai.APIStatusError), "no status after the first token"
    again = texts(stack.client, [PROMPTS[index] for index in broken], TOKENS)
    assert again == [undisturbed[index] for index in broken]
    stack.settle()
    until(lambda: len([p for p in ingresses() if p.pid != before[0].pid]) == 2, 90)
    assert texts(stack.client, PROMPTS, TOKENS) == undisturbed


class Resumable:
    """One prompt as a stream with ids, read in a thread until it ends or its connection breaks."""

    def __init__(self, url: str, prompt: str) -> None:
        self._url, self._prompt = url, prompt
        self.text, self.last_id, self.is_whole = "", "", False
        self.resumed = -1  # as the last event tells
        self.status = 0
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=({"x-stream-resume": "1"},))
        self._thread.start()

    def _read(self, headers: dict[str, str]) -> int:
        """Status of the answer; 0: the connection broke. Sampled without a seed: it cannot be computed again."""
        body = {"model": "embedded", "prompt": self._prompt, "max_tokens": TOKENS, "temperature": 1, "stream": True}
        try:
            with plain_http.stream(
                "POST", f"{self._url}/v1/completions", json=body, headers=headers, timeout=120
            ) as answer:
                for line in answer.iter_lines() if answer.status_code == 200 else ():
                    self._take(line)
                return answer.status_code
        except httpx.TransportError:
            return 0

    def _take(self, line: str) -> None:
        if line.startswith("id: "):
            self._next_id = line.removeprefix("id: ")
        elif line.startswith("data: {"):
            document = json.loads(line.removeprefix("data: "))
            assert "error" not in document, document
            self.text += document["choices"][0]["text"]
            self.resumed = document.get("slo", {}).get("resumed", self.resumed)
            self.last_id = self._next_id
            self.begun.set()
        self.is_whole |= line == "data: [DONE]"

    def join(self) -> None:
        self._thread.join(180)
        assert not self._thread.is_alive()

    def go_on(self) -> bool:
        """Whether an ingress has taken the rest; while Serve has not seen that one is dead, it sends us there."""
        self.status = self._read({"last-event-id": self.last_id})
        return self.status not in (0, 500, 502, 503)


def test_streams_of_an_ingress_that_dies_go_on_at_the_other(stack: Stack, undisturbed: list[str]) -> None:
    stack.settle()
    until(lambda: two_serve(stack), 90)
    streams = [Resumable(stack.url, prompt) for prompt in PROMPTS]
    assert all(stream.begun.wait(90) for stream in streams)
    kill_9(min(ingresses(), key=psutil.Process.create_time).pid)  # the proxy may not know the youngest yet
    for stream in streams:
        stream.join()
    broken = [stream for stream in streams if not stream.is_whole]
    assert broken, "the ingress that died had streams"
    for stream in broken:
        assert 0 < len(stream.text) < TOKENS
        until(stream.go_on, 30)
        assert stream.status == 200
    assert [stream.text for stream in streams] == undisturbed
    assert all(stream.is_whole for stream in streams)
    assert {stream.resumed for stream in broken} == {1}, "from the tokens that a replica had kept"
    stack.settle()


def shards(stack: Stack) -> list[dict[str, Any]]:
    return list(stack.status().get("shards", []))


def sizes(stack: Stack) -> list[int | None]:
    """Live replicas of each shard; none of one that does not answer."""
    return [shard.get("live") for shard in shards(stack)]


def balanced(stack: Stack, *gone: int) -> list[dict[str, Any]]:
    """Two controllers, neither of them ``gone``, with three replicas each, as one page has them.

    Each ingress has a page of its own: the next answer may be older, or lack a controller that was slow to answer.
    """
    page: list[dict[str, Any]] = []

    def is_so() -> bool:
        page[:] = shards(stack)
        return [shard.get("live") for shard in page] == [3, 3] and not {shard["pid"] for shard in page} & {*gone}

    until(is_so, 90, lambda: page)
    return page


def sharded(stack: Stack, count: int) -> dict[str, Any]:
    """The document with so many controllers, whose routing predicts."""
    changed = copy.deepcopy(stack.document)
    table = changed["applications"][0]["deployments"][0]["user_config"]
    table |= {"version": table["version"] + 1, "fleet": {"controller_shards": count, "routing": "marginal_load"}}
    return changed


def ask(stack: Stack, text: str) -> dict[str, Any]:
    """What becomes of a short request."""
    headers = {"x-slo-tier": "interactive"}
    return verdict(stack.client.completions.create(model="embedded", prompt=text, max_tokens=2, extra_headers=headers))


@pytest.fixture(scope="module")
def two_shards(stack: Stack) -> Stack:
    """From here on two controllers, in place, once both ingresses ask them."""
    stack.deploy(sharded(stack, 2))
    until(lambda: sizes(stack) == [3, 3], 90, lambda: sizes(stack))
    until(lambda: all(ask(stack, f"early {i}")["predicted_ttft_ms"] for i in range(12)), 30)
    return stack


def test_both_controllers_decide_and_replicas_of_both_serve(two_shards: Stack) -> None:
    before = balanced(two_shards)
    told = [ask(two_shards, f"number {i}") for i in range(8 * REPLICAS)]
    assert all(each["admitted"] and each["predicted_ttft_ms"] > 0 for each in told)
    assert len({each["replica"] for each in told}) >= 2

    def have_decided() -> bool:
        pairs = zip(balanced(two_shards), before, strict=True)
        return all(now["decisions"] > old["decisions"] for now, old in pairs)

    until(have_decided, 10)
    until(lambda: two_shards.status()["attainment"]["interactive"]["requests"] >= len(told), 10)
    two_shards.settle()


def kill_controllers_but(survivor: int) -> None:
    """End the other controller, also as Ray has restarted it: on a fast machine that takes less than to adopt."""
    for process in processes("ray::Controller"):
        if process.pid != survivor:
            with contextlib.suppress(ProcessLookupError):
                kill_9(process.pid)


@pytest.mark.parametrize("dead", [1, 0])
def test_replicas_of_a_dead_controller_are_adopted(two_shards: Stack, undisturbed: list[str], dead: int) -> None:
    stack, victim = two_shards, balanced(two_shards)[dead]["pid"]
    assert texts(stack.client, PROMPTS, TOKENS, lambda: kill_9(victim)) == undisturbed
    before, killed_s = balanced(stack, victim), time.monotonic()

    def has_adopted() -> bool:
        kill_controllers_but(before[1 - dead]["pid"])
        return sizes(stack)[1 - dead :][:1] == [REPLICAS]

    until(has_adopted, 30, lambda: sizes(stack))
    print(f"adopted after {time.monotonic() - killed_s:.1f} s")
    assert ask(stack, "in between")["admitted"]
    balanced(stack, victim, before[dead]["pid"])


def test_the_number_of_controllers_changes_while_they_serve(two_shards: Stack, undisturbed: list[str]) -> None:
    stack = two_shards
    for count in (1, 3):
        changed = partial(stack.deploy, sharded(stack, count))
        assert texts(stack.client, PROMPTS, TOKENS, changed) == undisturbed
        if count == 1:
            until(lambda: len(stack.live()) == REPLICAS and "shards" not in stack.status(), 60)
        else:
            until(lambda: sizes(stack) == [2, 2, 2], 90, lambda: sizes(stack))
        assert ask(stack, f"with {count}")["admitted"]
