"""Questions of several ingresses: what is decided together, in which order, and what becomes of each."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from controller.decisions import undecided
from controller.questions import ENOUGH, MOST_TOGETHER, Asked, Question, Questions
from protocol.messages import AdmissionRequest, Decision, Slo


class Decider:
    """Notes what it is asked, and takes ``takes_s`` on its clock each time."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.now_s, self.takes_s = 0.0, takes_s
        self.turns: list[list[str]] = []
        self.questions = Questions(self.decide, lambda: self.now_s)

    def decide(self, asked: Sequence[Asked]) -> list[Decision]:
        self.turns.append([request.request_id for _, request in asked])
        self.now_s += self.takes_s
        if any(request.request_id.startswith("bad") for _, request in asked):
            raise RuntimeError("no decision")
        return [undecided(request) for _, request in reversed(asked)]

    def ask(self, *names: str, **more: object) -> "asyncio.Task[list[str]]":
        async def asking() -> list[str]:
            requests = [
                msgspec.structs.replace(AdmissionRequest(name, 10, 10, Slo(1.0, 0.1)), **more) for name in names
            ]
            question = Question(requests, "ingress", 0.0, self.now_s)
            await self.questions.ask(question)
            return list(question.decisions)

        return asyncio.create_task(asking())


def played(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def test_what_comes_together_is_decided_together() -> None:
    async def scenario() -> None:
        decider = Decider()
        answers = await asyncio.gather(decider.ask("a", "b"), decider.ask("c"), decider.ask())
        assert [sorted(each) for each in answers] == [["a", "b"], ["c"], []]
        assert decider.turns == [["a", "b", "c"]]
        await decider.ask("d")
        assert decider.turns[1:] == [["d"]]

    played(scenario)


def test_a_long_question_lets_short_ones_through_and_others_be_heard() -> None:
    async def scenario() -> None:
        decider, heard = Decider(), list[int]()
        long = decider.ask(*names("a", 4 * MOST_TOGETHER))
        await asyncio.sleep(0)
        short = decider.ask("b")
        while not long.done():
            heard.append(len(decider.turns))
            await asyncio.sleep(0)
        assert await short == ["b"]
        assert sorted(await long) == sorted(names("a", 4 * MOST_TOGETHER))
        assert "b" in decider.turns[2], "of four"
        assert {1, 2} <= set(heard), "others ran after each turn"
        assert max(map(len, decider.turns)) == MOST_TOGETHER

    played(scenario)


def test_no_more_join_than_pays() -> None:
    async def scenario() -> None:
        decider = Decider()
        asked = decider.ask(*names("a", ENOUGH - 1)), decider.ask(*names("b", MOST_TOGETHER)), decider.ask("c", "d")
        await asyncio.gather(*asked, decider.ask("e"))
        assert decider.turns == [[*names("a", ENOUGH - 1), "c", "d"], names("b", MOST_TOGETHER), ["e"]]

    played(scenario)


def test_what_is_asked_again_meanwhile_is_decided_twice_and_not_at_once() -> None:
    async def scenario() -> None:
        decider = Decider()
        assert await asyncio.gather(decider.ask("a"), decider.ask("a", "b"), decider.ask("c")) == [
            ["a"],
            ["b", "a"],
            ["c"],
        ]
        assert decider.turns == [["a", "c"], ["a", "b"]]

    played(scenario)


def test_what_waits_longer_than_its_patience_is_not_decided() -> None:
    async def scenario() -> None:
        decider = Decider(takes_s=0.2)
        asked = decider.ask(*names("a", 2 * MOST_TOGETHER), patience_s=0.1)
        assert sorted(await asked) == sorted(names("a", MOST_TOGETHER))
        assert decider.questions.given_up == MOST_TOGETHER

    played(scenario)


def test_a_question_whose_sender_is_gone_is_skipped() -> None:
    async def scenario() -> None:
        decider = Decider()
        gone, staying = decider.ask("a"), decider.ask("b")
        await asyncio.sleep(0)
        gone.cancel()
        assert await staying == ["b"]
        assert decider.turns == [["b"]]

    played(scenario)


def test_a_fault_is_told_to_those_who_asked_and_to_nobody_else() -> None:
    async def scenario() -> None:
        decider = Decider()
        failed = decider.ask("bad", *names("a", MOST_TOGETHER))
        with pytest.raises(RuntimeError, match="no decision"):
            await failed
        assert await decider.ask("b") == ["b"]
        assert len(decider.turns) == 2, "the rest of what failed is not decided"

    played(scenario)
