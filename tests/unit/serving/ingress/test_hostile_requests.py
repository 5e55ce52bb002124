"""Whatever one client sends, it gets an answer that it can read, and its neighbour gets what it asked for.

Some hundred cases, always the same, run with the other tests; ``make hostile`` tries 10,000 new ones.
"""

import asyncio
import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("ray")
pytest.importorskip("vllm")

from protocol.messages import AdmissionRequest, Decision
from tests.support.hostile_cases import CHAT, COMPLETION, cases
from tests.support.hostile_client import Answer, Case, ModelReplica, call, complaint
from tests.support.ingress_scene import Ingress, admitted, refused

HANG_S = 60.0  # no case takes a second
ORDINARY = 300  # cases
MOST = max(ORDINARY, settings().max_examples)
IS_LONG = MOST > ORDINARY
INNOCENT = Case("/v1/completions", json.dumps(COMPLETION | {"max_tokens": 6}).encode())


class Arena:
    """An ingress for as many cases as it survives."""

    def __init__(self) -> None:
        self.ingress: Ingress | None = None

    def up(self) -> Ingress:
        if self.ingress is None:
            self.ingress = Ingress()
            self.ingress.transport = ModelReplica()
            self.ingress.__enter__()
        return self.ingress

    def renew(self) -> None:
        """After a failure, so that the next case does not suffer for it."""
        if self.ingress is not None:
            self.ingress.__exit__()
        self.ingress = None


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    arena.renew()


async def beside(ingress: Ingress, case: Case) -> tuple[Answer, Answer]:
    """A hostile request and an innocent one in the same tick of the event loop; nothing is left of them."""

    def decide(ask: AdmissionRequest) -> Decision:
        return refused(ask) if case.is_overloaded and ask.slo.tier == "interactive" else admitted(ask)

    ingress.transport.decide = decide
    async with asyncio.timeout(HANG_S):
        hostile, innocent = await asyncio.gather(call(ingress.ingress_app, case), call(ingress.ingress_app, INNOCENT))
        while ingress.client.dispatcher.requests:
            await asyncio.sleep(0)
    return hostile, innocent


def check(arena: Arena, case: Case) -> None:
    """All that has to hold of one case."""
    ingress = arena.up()
    ingress.reset()
    try:
        hostile, innocent = ingress.run(beside(ingress, case), 2 * HANG_S)
        assert innocent.status == 200, innocent.body
        assert json.loads(innocent.body)["choices"][0]["text"] == "abcdef"
        if case.leaves is None:
            assert not (found := complaint(case, hostile)), (found, hostile.body[:300])
    except BaseException:
        arena.renew()
        raise


@pytest.mark.timeout(0 if IS_LONG else 300)
@settings(max_examples=MOST, derandomize=not IS_LONG, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_one_request_is_no_fault_of_another(arena: Arena, case: Case) -> None:
    check(arena, case)


def chat(**fields: object) -> bytes:
    return json.dumps(CHAT | fields).encode()


def completion(**fields: object) -> bytes:
    return json.dumps(COMPLETION | fields).encode()


SEEN = {  # what once hung, failed with 500, or was answered in a form that clients cannot read
    "figures on a prompt of one token": Case("/v1/completions", completion(prompt="\x00", prompt_logprobs=1)),
    "figures on a prompt that is echoed": Case("/v1/completions", completion(prompt="hi", echo=True, logprobs=1)),
    "a surrogate in a stop string": Case("/v1/completions", completion(stop=["\ud800"])),
    "an integer beyond 64 bits": Case("/v1/completions", completion(top_k=2**70)),
    "a surrogate in the session's id": Case("/v1/completions", completion(session_id="\ud800")),
    "a surrogate in a word to avoid": Case("/v1/completions", completion(bad_words=["\ud800"])),
    "arguments that vLLM does not know": Case("/v1/chat/completions", chat(vllm_xargs={"a": "\ud800"})),
    "a bound beyond 64 bits": Case("/v1/completions", completion(structured_outputs={"json": {"maximum": 2**70}})),
    "a schema that is itself": Case("/v1/completions", completion(structured_outputs={"json": {"$ref": "#"}})),
    "a grammar that is itself": Case("/v1/completions", completion(structured_outputs={"grammar": "root ::= root"})),
    "structured outputs that are no object": Case("/v1/completions", completion(structured_outputs=[])),
    "the same by another route": Case("/invocations", chat(structured_outputs="a")),
    "deep brackets": Case("/v1/completions", b"[" * 100_000),
    "deep brackets in slo": Case("/v1/completions", b'{"slo":' + b"[" * 60_000 + b"]" * 60_000 + b"}"),
    "a surrogate as a key of slo": Case("/v1/completions", completion(slo={"\ud800": 1})),
    "a long figure": Case("/v1/completions", completion(), ((b"x-slo-ttft-ms", b"9" * 14_000),)),
    "an id that is not text": Case("/v1/completions", completion(), ((b"x-request-id", b"\xff\xfe"),)),
    "a decision, which no model here makes": Case("/v1/systemone", b'{"questions": {}, "state": null}'),
    "Anthropic's shape without a body": Case("/v1/messages", b"", ()),
    "many sequences in a tier that refuses": Case(
        "/v1/completions", completion(n=128, service_tier="interactive"), is_overloaded=True
    ),
}


@pytest.mark.parametrize("name", sorted(SEEN))
def test_what_was_seen_before(arena: Arena, name: str) -> None:
    check(arena, SEEN[name])
