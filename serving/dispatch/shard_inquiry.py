"""One batch's way through several shards: each question to its first one, and on until a shard keeps it."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from protocol.messages import AdmissionRequest, Decision, Verdict
from serving.dispatch.shard_choice import Ask, Place, groups_of, plan_asks

AskShard = Callable[[int, list[AdmissionRequest]], Awaitable[list[Decision] | None]]
Release = Callable[[int, Sequence[Decision]], None]


@dataclass
class _Course:
    """Questions that one shard has to answer, and the shards that are still to be asked."""

    questions: list[AdmissionRequest]
    place: Place | None
    asks: list[Ask]


class Inquiry:
    """``ask(shard, questions)`` gives its decisions, or none where it is silent and no longer in ``loads()``."""

    def __init__(
        self, ask: AskShard, release: Release, loads: Callable[[], Mapping[int, float]], rng: random.Random
    ) -> None:
        """``release``: told what a shard has reserved and nobody follows."""
        self._ask, self._release, self._loads, self._random = ask, release, loads, rng
        self._began_s = time.monotonic()
        self.decided: list[tuple[int, Decision]] = []  # with the shard of each

    async def run(self, batch: Sequence[AdmissionRequest], place: Callable[[str], Place | None]) -> None:
        """Have all decided; ``place``: where a request of this id was decided before.

        Raises:
            ConnectionError: no shard answers; what is ``decided`` by then stands.
        """
        loads, courses = self._loads(), []
        for questions in groups_of(batch):
            before = next((found for each in questions if (found := place(each.request_id))), None)
            asks = plan_asks(questions[0], loads, self._random, before)
            courses.append(_Course(questions, before, list(asks)))
        await self._go_on(courses)

    async def _go_on(self, courses: Sequence[_Course]) -> None:
        """Every course to its next shard; all of these at the same time, and none waits for another."""
        by_shard = dict[int, list[_Course]]()
        for course in courses:
            self._find_next(course)
            by_shard.setdefault(course.asks[0].shard, []).append(course)
        asking = (self._ask_shard(shard, together) for shard, together in by_shard.items())
        for ended in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended

    def _find_next(self, course: _Course) -> None:
        """Leave out what answers no more; where nothing is left, any shard that answers has the last word."""
        loads = self._loads()
        asks = [ask for ask in course.asks if ask.shard in loads]
        asks = asks or list(plan_asks(course.questions[0], loads, self._random, course.place)[:1])
        if not asks:
            raise ConnectionError("no shard of the controller answers")
        course.asks = [*asks[:-1], Ask(asks[-1].shard, may_hop=False)]

    async def _ask_shard(self, shard: int, courses: Sequence[_Course]) -> None:
        asks = [course.asks.pop(0) for course in courses]
        questions = [self._now(q, ask) for course, ask in zip(courses, asks, strict=True) for q in course.questions]
        decisions = await self._ask(shard, questions)
        if decisions is None:
            await self._go_on(courses)
            return
        told, onward = {decision.request_id: decision for decision in decisions}, []
        for course, ask in zip(courses, asks, strict=True):
            answers = [told[question.request_id] for question in course.questions]
            if ask.may_hop and any(answer.verdict == Verdict.ELSEWHERE for answer in answers):
                self._release(shard, answers)
                onward.append(course)
            else:
                self.decided += [(shard, answer) for answer in answers]
        if onward:
            await self._go_on(onward)

    def _now(self, question: AdmissionRequest, ask: Ask) -> AdmissionRequest:
        """The question as it is to be asked after the time that earlier shards have taken."""
        gone_s = time.monotonic() - self._began_s
        age_s, patience_s = question.age_s + gone_s, question.patience_s - gone_s
        return msgspec.structs.replace(question, age_s=age_s, patience_s=patience_s, may_hop=ask.may_hop)
