"""Several controllers as if they were one: each has its part of the replicas (PolyServe section 5.6).

Which of them is asked is ``shard_choice``'s word. With a single one, everything goes straight to it. Of several, one
that fails or is silent is asked nothing until it answers a ping, and what it was asked goes to another.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from controller.deploys import ApplicationClash
from protocol.messages import AdmissionRequest, Decision, Outcome, Verdict
from protocol.shards import LEADER
from serving.dispatch.background import quietly
from serving.dispatch.controller_link import ControllerLink
from serving.dispatch.controller_shard import SHARD_ANSWER_S, Shard
from serving.dispatch.engine_request import released
from serving.dispatch.shard_book import ShardBook
from serving.dispatch.shard_inquiry import Inquiry
from serving.dispatch.shard_status import merged_status

LATE_S = 60.0  # an answer that comes later is not heard: the shard has forgotten what it reserved
PING_S = 1.0  # that the others have left, once one shard has answered a ping
STATUS_S = 1.0


class ControllerShards:
    """``make_link(shard)`` gives the way to one; ``configure`` says how many there are."""

    def __init__(self, make_link: Callable[[int], ControllerLink], rng: random.Random | None = None) -> None:
        self._make_link, self._random = make_link, rng or random.Random()
        self.leader = Shard(make_link(LEADER), answers=True)
        self._shards = {LEADER: self.leader}  # and those beyond the number in force that still have requests
        self._count = 1
        self._book = ShardBook()
        self._notices: set[asyncio.Task[None]] = set()

    @property
    def _is_alone(self) -> bool:
        return len(self._shards) == 1

    @property
    def in_force(self) -> list[Shard]:
        """Those that there are to be."""
        return [shard for shard in self._shards.values() if shard.number < self._count]

    def loads(self) -> dict[int, float]:
        """Of the shards that may be asked, as told last."""
        return {shard.number: shard.load for shard in self.in_force if shard.answers}

    # -- how many there are -----------------------------------------------------------------------------------------

    async def configure(self, options: bytes, tiers: bytes, count: int = 1) -> None:
        """Ping them all with what this ingress knows; ``count``: how many there are to be.

        Those that are slow are waited for no longer than ``PING_S`` after the first; their pings go on.

        Raises:
            ApplicationClash: another application has one of them.
            Exception: none of them answers.
        """
        self._resize(count)
        if self._is_alone:
            await self.leader.link.start()
            await self.leader.link.configure(options, tiers)
            return
        pings = [shard.ping(options, tiers) for shard in self.in_force]
        await _until_one_succeeds(pings)
        if late := [ping for ping in pings if not ping.done()]:
            await asyncio.wait(late, timeout=PING_S)
        for shard in self.in_force:
            shard.note_late_ping()
        errors = [error for ping in pings if ping.done() and (error := ping.exception())]
        clashes = [error for error in errors if isinstance(error, ApplicationClash)]
        if clashes or len(errors) == len(pings):
            raise (clashes or errors)[0]

    def _resize(self, count: int) -> None:
        """Have links to so many; others stay for as long as a request of theirs has not ended."""
        self._book.expire(time.monotonic())
        for number in range(count):
            if number not in self._shards:
                self._shards[number] = Shard(self._make_link(number), answers=False)
        self._count = count
        for number in [number for number in self._shards if number >= count and not self._book.has_any_of(number)]:
            self._shards.pop(number).close()

    # -- decisions --------------------------------------------------------------------------------------------------

    async def admit(self, batch: list[AdmissionRequest]) -> list[Decision]:
        """Decisions in the batch's order; an empty batch asks whether any controller is there.

        Raises:
            Exception: the only controller does not answer.
            ConnectionError: none of several does.
        """
        if self._is_alone:
            return (await self.leader.link.admit(batch)).decisions
        if not batch:
            await self._find_any()
            return []
        inquiry = Inquiry(self._ask, self._release, self.loads, self._random)
        try:
            await inquiry.run(batch, self._book.place)
        finally:
            for number, decision in inquiry.decided:
                if (earlier := self._book.note(number, decision, time.monotonic())) is not None:
                    self._release(earlier, [decision])
        decisions = {decision.request_id: decision for _, decision in inquiry.decided}
        return [decisions[question.request_id] for question in batch]

    async def _find_any(self) -> None:
        """Ask them all, also those that were silent."""
        shards = self.in_force
        told = await asyncio.gather(*(shard.ask_load() for shard in shards))
        for shard, has_told in zip(shards, told, strict=True):
            shard.answers |= has_told
        if not any(told):
            raise ConnectionError("no shard of the controller answers")

    async def _ask(self, number: int, questions: list[AdmissionRequest]) -> list[Decision] | None:
        """One shard's decisions; none where it fails, or is silent: then it is asked no more."""
        shard = self._shards.get(number)
        if shard is None:
            return None
        asked = shard.question(questions, LATE_S)
        try:
            await asyncio.wait([asked], timeout=SHARD_ANSWER_S)
        finally:
            if not asked.done():
                asked.add_done_callback(lambda asked: self._take_late(number, asked))
        return shard.decisions(asked)

    def _take_late(self, number: int, asked: "asyncio.Task[Any]") -> None:
        """What a shard has reserved too late is free again, unless it has decided about the same once more."""
        if asked.cancelled() or asked.exception():
            return
        places = [(self._book.place(decision.request_id), decision) for decision in asked.result().decisions]
        self._release(number, [decision for place, decision in places if place is None or place.shard != number])

    def _release(self, number: int, decisions: Sequence[Decision]) -> None:
        """Have a shard forget, in the background, what it has decided."""
        left = [released(each) for each in decisions if each.verdict not in (Verdict.REFUSED, Verdict.ELSEWHERE)]
        if left and number in self._shards:
            notice = asyncio.get_running_loop().create_task(quietly(self._shards[number].link.on_outcomes, left))
            self._notices.add(notice)
            notice.add_done_callback(self._notices.discard)

    # -- everything else --------------------------------------------------------------------------------------------

    async def on_outcomes(self, outcomes: list[Outcome]) -> None:
        """Each goes to the shard that has decided; where there are several, those of a dead one are lost quietly."""
        if self._is_alone:
            await self.leader.link.on_outcomes(outcomes)
            return
        by_shard = self._book.sort(outcomes).items()
        told = [(self._shards.get(number, self.leader), ended) for number, ended in by_shard]
        await asyncio.gather(*(quietly(shard.link.on_outcomes, ended) for shard, ended in told))

    async def on_failed(self, replica: str) -> None:
        """They all hear of it: whose replica it is, they know."""
        if self._is_alone:
            await self.leader.link.on_failed(replica)
            return
        await asyncio.gather(*(quietly(shard.link.on_failed, replica) for shard in self._shards.values()))

    async def hear_recalls(self) -> list[str]:
        """What any of them recalls, as soon as there is something; each has one question open at a time."""
        if self._is_alone and self.leader.hearing(may_ask=False) is None:
            return await self.leader.link.hear_recalls()
        shards = list(self._shards.values())
        open_questions = [task for shard in shards if (task := shard.hearing(may_ask=not self._is_alone))]
        await asyncio.wait(open_questions, return_when=asyncio.FIRST_COMPLETED)
        return [attempt_id for shard in shards for attempt_id in shard.take_heard()]

    async def reach(self) -> None:
        """Hold a socket to the leader, until that or it ends; those to the others are held beside it."""
        await self.leader.link.reach()

    async def status(self) -> dict[str, Any]:
        """The page of the only one, or of all that answer as one (``merged_status``).

        Raises:
            Exception: the only controller does not answer.
            ConnectionError: none of several does.
        """
        if self._is_alone:
            return await self.leader.link.status()
        shards = self.in_force
        asked = [shard for shard in shards if shard.answers] or shards
        asking = (asyncio.wait_for(shard.link.status(), STATUS_S) for shard in asked)
        pages = await asyncio.gather(*asking, return_exceptions=True)
        told = {shard.number: page for shard, page in zip(asked, pages, strict=True) if isinstance(page, dict)}
        if not told:
            raise ConnectionError(f"no shard of the controller answers: {pages[0]!r}")
        return merged_status({shard.number: told.get(shard.number) for shard in shards}, self.loads())

    def close(self) -> None:
        """End everything that runs here."""
        for shard in self._shards.values():
            shard.close()
        for notice in self._notices:
            notice.cancel()


async def _until_one_succeeds(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Wait until one of them has, or all have failed."""
    waiting = set(tasks)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if any(not task.cancelled() and task.exception() is None for task in done):
            return
