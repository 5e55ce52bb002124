"""What a replica takes and tells, request by request: one that is broken concerns no other."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

pytest.importorskip("ray")

from protocol.messages import Delta, Outputs, Slo, Submission
from replicas.channels import Channels, encode_outputs
from replicas.engine import EngineFailure
from replicas.hosted import take_each


class OneByOne:
    """An engine that takes what ``refuses`` does not raise at."""

    def __init__(self, refuses: Callable[[Submission], None] = lambda _: None) -> None:
        self.refuses, self.taken, self.aborted = refuses, list[str](), list[str]()

    async def submit(self, batch: list[Submission]) -> None:
        (submission,) = batch
        self.refuses(submission)
        self.taken.append(submission.request_id)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        raise RuntimeError("unknown")


def submission(name: str) -> Submission:
    return Submission(name, 5, 0, 50, Slo(), 0.0, 10, 1)


def take(engine: OneByOne, channels: Channels, batch: list[Any]) -> dict[str, str]:
    _, rejections = asyncio.run(take_each(msgspec.msgpack.encode(batch), "one", channels, engine))  # type: ignore[arg-type]
    return {rejection.request_id: rejection.reason for rejection in rejections}


@pytest.mark.parametrize(
    "error", [ValueError("poison"), TypeError("poison"), RuntimeError("poison"), KeyError("poison")]
)
def test_what_an_engine_does_not_take_is_rejected_alone_and_has_no_route(error: Exception) -> None:
    def refuse(submission: Submission) -> None:
        if submission.request_id == "bad":
            raise error

    engine, channels = OneByOne(refuse), Channels(heartbeat_s=60)
    rejected = take(engine, channels, [submission(name) for name in ("a", "bad", "b")])
    assert list(rejected) == ["bad"]
    assert "poison" in rejected["bad"]
    assert engine.taken == ["a", "b"]
    assert engine.aborted == ["bad"], "it may have noted a part of it"
    assert [channels.has(name) for name in ("a", "bad", "b")] == [True, False, True]


def test_what_cannot_be_read_is_rejected_by_its_name() -> None:
    engine, channels = OneByOne(), Channels(heartbeat_s=60)
    broken = list(msgspec.to_builtins(submission("bad")))
    broken[1] = "five"
    assert list(take(engine, channels, [broken, submission("a")])) == ["bad"]
    assert engine.taken == ["a"]


def test_a_name_that_is_in_use_is_rejected_and_its_owner_runs_on() -> None:
    engine, channels = OneByOne(), Channels(heartbeat_s=60)
    rejected = take(engine, channels, [submission("a"), submission("a"), submission("b")])
    assert list(rejected) == ["a"]
    assert engine.taken == ["a", "b"]
    assert channels.has("a")


def test_an_engine_that_died_is_no_rejection() -> None:
    def die(_: Submission) -> None:
        raise EngineFailure("it died")

    with pytest.raises(EngineFailure):
        take(OneByOne(die), Channels(heartbeat_s=60), [submission("a")])


def test_a_delta_that_cannot_be_encoded_is_an_error_of_its_own_request() -> None:
    bad = Delta("bad", (2**70,))
    told = msgspec.msgpack.decode(
        encode_outputs(Outputs(3, True, (Delta("a", (1,)), bad, Delta("b", (2,), "stop")))), type=Outputs
    )
    assert (told.steps, told.busy) == (3, True)
    a, error, b = told.deltas
    assert (a, b) == (Delta("a", (1,)), Delta("b", (2,), "stop"))
    assert (error.request_id, error.token_ids, error.finish) == ("bad", (), "error")
    assert "cannot be encoded" in str(error.stop_reason)
