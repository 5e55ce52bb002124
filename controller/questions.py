"""Questions that wait for a decision. Several of them share one call of ``decide``, whichever ingress asks.

A call has a fixed cost, such as moving the mirrors on to now, and a choice among more requests is a better one. So the
questions that came during the last call share the next one, as far as ``ENOUGH`` allows. A turn is one call; other
messages are heard between two turns. A long question is decided in parts, one per turn. No ray here.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from controller.patience import given_up, parts
from protocol.messages import AdmissionRequest, Decision

MOST_TOGETHER = 16  # requests that are decided without a pause
ENOUGH = 8  # no more questions join so many: a request hardly takes less time among more

Asked = tuple[str, AdmissionRequest]  # by which ingress


@dataclass(eq=False)
class Question:
    """Requests of one ``ingress``; ``waited_s`` is how long they had waited at ``came_s``, when they were heard."""

    requests: Sequence[AdmissionRequest]
    ingress: str
    waited_s: float
    came_s: float
    decisions: dict[str, Decision] = field(default_factory=dict)  # by request id; none of what was given up
    left: deque[list[AdmissionRequest]] = field(default_factory=deque)  # parts that are not decided
    answered: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, error: Exception | None = None) -> None:
        """It is decided, or cannot be."""
        if self.answered.done():
            return
        if error is None:
            self.answered.set_result(None)
        else:
            self.answered.set_exception(error)


class Questions:
    """A queue of questions. Each turn takes some from its front, and decides one part of each."""

    def __init__(self, decide: Callable[[Sequence[Asked]], Sequence[Decision]], clock: Callable[[], float]) -> None:
        """``decide`` blocks, and returns one decision for each request that it is given, in any order. ``clock`` is the
        one of ``Question.came_s``."""
        self._decide, self._clock = decide, clock
        self._waiting: deque[Question] = deque()
        self.given_up = 0  # requests for which nobody waited any more

    async def ask(self, question: Question) -> None:
        """Return once ``question.decisions`` has all requests but those given up; raises what ``decide`` does."""
        question.left.extend(parts(question.requests, MOST_TOGETHER))
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.turn)
        self._waiting.append(question)
        await question.answered

    def turn(self) -> None:
        """Decide one part of each question that ``_take`` returns. Those with parts left go to the end of the queue.
        The next turn is scheduled, not called, so that other messages are heard before it."""
        taken = self._take()
        try:
            self._decide_together(taken)
        except Exception as error:
            for question in taken:
                question.end(error)
        for question in taken:
            if question.left:
                self._waiting.append(question)
            else:
                question.end()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self.turn)

    def _take(self) -> list[Question]:
        """The questions whose next parts are decided in this turn, in order. They are taken until their parts have
        ``ENOUGH`` requests; several parts have ``MOST_TOGETHER`` at most, a single one may have more.

        A request may be in two questions, where an ingress asked again because the answer came late. These have
        different turns, since ``decide`` takes a request once. Passed-over questions keep their places.
        """
        taken, names, later = list[Question](), set[str](), list[Question]()
        while self._waiting and len(names) < ENOUGH:
            question = self._waiting.popleft()
            if question.answered.done():
                continue  # nobody waits for it: its connection broke
            own = {request.request_id for request in question.left[0]}
            if names & own or (names and len(names) + len(own) > MOST_TOGETHER):
                later.append(question)
            else:
                taken.append(question)
                names |= own
        self._waiting.extendleft(reversed(later))
        return taken

    def _decide_together(self, taken: Sequence[Question]) -> None:
        """Call ``decide`` once with the next part of each question, less the requests that nobody waits for."""
        now_s, asked, asking = self._clock(), dict[str, Question](), list[Asked]()
        for question in taken:
            part = question.left.popleft()
            gone = given_up(part, question.waited_s + now_s - question.came_s)
            self.given_up += len(gone)
            for request in part:
                if request.request_id not in gone:
                    asked[request.request_id] = question
                    asking.append((question.ingress, request))
        for decision in self._decide(asking) if asking else ():
            asked[decision.request_id].decisions[decision.request_id] = decision
