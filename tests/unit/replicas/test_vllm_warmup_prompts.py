"""What a replica runs before it serves, on an engine that only counts."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.messages import Delta, Submission
from replicas.config import ReplicaConfig
from replicas.delivery import DeliveryTime
from replicas.engine import EngineTotals


class OwnTime(asyncio.SelectorEventLoop):
    """A loop whose clock goes on to the next timer at once, whatever the machine has to do beside it."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s, select = 0.0, self._selector.select  # type: ignore[attr-defined]

        def leap(timeout: float | None = None) -> Any:
            self._now_s += timeout or 0.0
            return select(0)

        self._selector.select = leap  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now_s


class Counting:
    """Answers each iteration with one token of every request; iteration ``k`` takes ``seconds.get(k, usual_s)``."""

    def __init__(
        self,
        max_model_len: int = 4096,
        usual_s: float = 0.0,
        seconds: dict[int, float] | None = None,
        refused: str = "",
    ) -> None:
        model = SimpleNamespace(max_model_len=max_model_len, get_vocab_size=lambda: 256)
        self.vllm_config = SimpleNamespace(model_config=model, speculative_config=None)
        self.asked, self.aborted = list[Submission](), list[str]()
        self.totals, self.delivery, self.asking = EngineTotals(), DeliveryTime(), None
        self.iterations, self.unread = 0, 0
        self._left, self._steps = dict[str, int](), list[float]()
        self._usual_s, self._seconds, self._refused = usual_s, seconds or {}, refused
        self._until_s = 0.0  # of the iteration in flight, which an abort does not stop

    def state(self) -> Any:
        return SimpleNamespace(limits=SimpleNamespace(max_batch_tokens=2048), kv_capacity_tokens=10_000)

    async def submit(self, batch: list[Submission]) -> None:
        for each in batch:
            self.asked.append(each)
            self._left[each.request_id] = 1 if each.request_id == self._refused else each.max_tokens

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            del self._left[request_id]
        if request_ids:
            self.asking = asyncio.create_task(self._answer())  # type: ignore[assignment]

    async def _answer(self) -> None:
        """The iteration in flight ends first, and is told."""
        if (left_s := self._until_s - asyncio.get_running_loop().time()) > 0.0:
            await asyncio.sleep(left_s)
            self._end(self._seconds.get(self.iterations, self._usual_s))
            self.unread += 1

    def _end(self, seconds: float) -> None:
        self.iterations += 1
        self._steps.append(seconds)

    async def next_outputs(self) -> list[Delta]:
        if self.unread:
            self.unread -= 1
            return []
        if not self._left:
            await asyncio.Event().wait()
        seconds = self._seconds.get(self.iterations, self._usual_s)
        self._until_s = asyncio.get_running_loop().time() + seconds
        await asyncio.sleep(seconds)
        self._until_s = 0.0
        self._end(seconds)
        self.totals.generation_tokens += len(self._left)
        self._left = {name: left - 1 for name, left in self._left.items()}
        deltas = [Delta(name, (1,), "" if left else "length") for name, left in self._left.items()]
        self._left = {name: left for name, left in self._left.items() if left}
        return deltas

    def take_steps(self) -> tuple[float, ...]:
        steps, self._steps = tuple(self._steps), []
        return steps


def warmed_up(engine: Counting, limit_s: float = 60.0) -> Counting:
    from replicas.vllm_warmup_prompts import warm_up

    with asyncio.Runner(loop_factory=OwnTime) as runner:
        runner.run(warm_up(engine, limit_s))  # type: ignore[arg-type]
    assert not engine._left, "nothing runs on"
    assert not engine.unread, "nothing is left to read"
    return engine


def test_prompts_double_up_to_what_one_iteration_takes() -> None:
    lengths = [each.prompt_tokens for each in warmed_up(Counting()).asked]
    assert lengths == [16, 32, 64, 128, 256, 512, 1024, 2048] * 2
    assert [each.prompt_tokens for each in warmed_up(Counting(max_model_len=100)).asked] == [16, 32, 64] * 2


def test_no_two_prompts_are_alike_not_those_of_another_start_either() -> None:
    from replicas.vllm_codec import decode_request

    asked = [*warmed_up(Counting()).asked, *warmed_up(Counting()).asked]
    begin = {tuple(decode_request(each.payload).prompt_token_ids[:16]) for each in asked}
    assert len(begin) == len(asked) == 32


def test_only_the_second_round_is_told_and_counts_begin_after_it() -> None:
    engine = Counting()
    delivery = engine.delivery
    warmed_up(engine)
    assert 32 < len(engine.take_steps()) < 64  # the last prompt decodes 32 tokens, after seven others have begun
    assert engine.totals.generation_tokens == 0
    assert engine.delivery is not delivery
    assert not engine.aborted


def test_a_slow_engine_runs_what_there_is_time_for_and_tells_it() -> None:
    engine = warmed_up(Counting(usual_s=0.02), limit_s=0.4)
    assert 2 <= len(engine.asked) < 16
    assert engine.aborted
    assert engine.take_steps()


def test_a_first_round_that_stood_still_is_told_to_nobody_and_the_second_one_is() -> None:
    engine = warmed_up(Counting(seconds={2: 0.5}), limit_s=0.8)
    steps = engine.take_steps()
    assert len(steps) > 32
    assert max(steps) == 0.0


def test_a_second_round_that_stood_still_is_told_to_nobody() -> None:
    engine = warmed_up(Counting(seconds={45: 0.5}), limit_s=0.8)
    assert engine.iterations == 46, "it has ended, and none came after it"
    assert engine.take_steps() == ()
    assert engine.totals.generation_tokens == 0


@pytest.mark.parametrize("usual_s", [3.0, 6.0])
def test_an_engine_whose_every_iteration_takes_longer_than_a_round_tells_one(usual_s: float) -> None:
    engine = warmed_up(Counting(usual_s=usual_s), limit_s=5.0)
    assert engine.take_steps() == (usual_s,)


def test_an_engine_that_stands_still_for_long_is_not_waited_for() -> None:
    engine = Counting(seconds={2: 50.0})
    warmed_up(engine, limit_s=0.8)
    assert {each.request_id[:8] for each in engine.asked} == {"warmup-0"}
    assert engine.take_steps() == ()


def test_a_prompt_that_the_engine_refuses_holds_up_nothing() -> None:
    assert len(warmed_up(Counting(refused="warmup-0-3")).asked) == 16


def test_an_engine_that_drafts_runs_none() -> None:
    engine = Counting()
    engine.vllm_config.speculative_config = object()
    assert not warmed_up(engine).asked


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "simulated", "profile": "h200_sxm__llama-3.1-8b"},
        {"device": "timed", "profile": "h200_sxm__llama-3.1-8b"},
        {"warmup_s": 0.0},
    ],
)
def test_engines_whose_time_is_the_profiles_do_not_warm_up(settings: dict[str, Any]) -> None:
    assert ReplicaConfig().warms_up
    assert not ReplicaConfig(**settings).warms_up
