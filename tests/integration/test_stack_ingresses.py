"""Two ingresses over one controller, and simulated replicas that share processes: who dies takes only his own along."""

import threading
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest

from tests.support.stack import Stack, kill_9, running, texts, until

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
    """Processes that serve HTTP."""
    return [p for p in psutil.Process().children(recursive=True) if ":Ingress" in " ".join(p.cmdline())]


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
