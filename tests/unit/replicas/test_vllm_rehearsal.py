"""What a replica runs before it serves, on an engine that only counts."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.messages import Delta, Submission
from replicas.config import ReplicaConfig
from replicas.engine import EngineTotals


class Counting:
    """Answers each iteration with one token of every request; one iteration in ``iteration_s`` seconds."""

    def __init__(self, max_model_len: int = 4096, iteration_s: float = 0.0, refused: str = "") -> None:
        self.model_config = SimpleNamespace(max_model_len=max_model_len, get_vocab_size=lambda: 256)
        self.asked, self.aborted = list[Submission](), list[str]()
        self.totals = EngineTotals()
        self._left, self._iteration_s, self._steps = dict[str, int](), iteration_s, list[int]()
        self._refused = refused

    def state(self) -> Any:
        return SimpleNamespace(limits=SimpleNamespace(max_batch_tokens=2048), kv_capacity_tokens=10_000)

    async def submit(self, batch: list[Submission]) -> None:
        for each in batch:
            self.asked.append(each)
            self._left[each.request_id] = 1 if each.request_id == self._refused else each.max_tokens

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self._left.pop(request_id)

    async def next_outputs(self) -> list[Delta]:
        assert self._left, "nothing runs: this would never come back"
        await asyncio.sleep(self._iteration_s)
        self.totals.generation_tokens += len(self._left)
        self._steps.append(len(self._left))
        self._left = {name: left - 1 for name, left in self._left.items()}
        deltas = [Delta(name, (1,), "" if left else "length") for name, left in self._left.items()]
        self._left = {name: left for name, left in self._left.items() if left}
        return deltas

    def take_steps(self) -> tuple[int, ...]:
        steps, self._steps = tuple(self._steps), []
        return steps


def rehearsed(engine: Counting, limit_s: float = 60.0) -> Counting:
    from replicas.vllm_rehearsal import rehearse

    asyncio.run(rehearse(engine, limit_s))  # type: ignore[arg-type]
    return engine


def test_prompts_double_up_to_what_one_iteration_takes_and_no_prefix_is_common() -> None:
    engine = rehearsed(Counting())
    lengths = [each.prompt_tokens for each in engine.asked]
    assert lengths == [16, 32, 64, 128, 256, 512, 1024, 2048] * 2
    assert len({each.payload for each in engine.asked}) == len(lengths)
    assert [each.prompt_tokens for each in rehearsed(Counting(max_model_len=100)).asked] == [16, 32, 64] * 2


def test_only_the_second_round_is_told_and_counts_begin_after_it() -> None:
    engine = rehearsed(Counting())
    steps = engine.take_steps()
    assert 32 < len(steps) < 64  # the last prompt of a round decodes 32 tokens, after seven others have begun
    assert engine.totals.generation_tokens == 0
    assert not engine.aborted


def test_a_slow_engine_is_stopped_in_time_and_nothing_runs_on() -> None:
    engine = rehearsed(Counting(iteration_s=0.02), limit_s=0.2)
    assert 2 <= len(engine.asked) < 16
    assert engine.aborted
    assert not engine._left


def test_a_prompt_that_the_engine_refuses_holds_up_nothing() -> None:
    engine = rehearsed(Counting(refused="rehearsal-0-3"))
    assert len(engine.asked) == 16


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "simulated", "profile": "h200_sxm__llama-3.1-8b"},
        {"device": "timed", "profile": "h200_sxm__llama-3.1-8b"},
        {"num_speculative_tokens": 3},
        {"engine_kwargs": {"speculative_config": {"method": "ngram"}}},
        {"rehearsal_s": 0.0},
    ],
)
def test_engines_that_would_learn_nothing_or_the_wrong_thing_do_not_rehearse(settings: dict[str, Any]) -> None:
    assert ReplicaConfig().rehearses
    assert not ReplicaConfig(**settings).rehearses
