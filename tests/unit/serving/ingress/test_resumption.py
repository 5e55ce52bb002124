"""Streams that a client takes up again: from the tokens that a replica has kept, or made once more."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from protocol.kept_streams import KeptStream
from protocol.messages import Verdict
from serving.dispatch import delivery_pace
from tests.support.ingress_scene import Ingress, refused
from tests.unit.serving.ingress.test_requests import sound

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages")
ASKED = ("x-stream-resume", "1")
TOKENS = 14
MADE = tuple(ord("a") + i for i in range(TOKENS))  # what the replica of the scene answers

Event = tuple[str, str]  # id and the rest


@pytest.fixture
def ingress(ingress: Ingress, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ingress]:
    """One whose replica makes some tokens at a time, which are delivered at once."""
    monkeypatch.setattr(delivery_pace, "MOST_S", 0.0)
    ingress.transport.pause_s = 0.003
    yield ingress
    ingress.transport.pause_s = 0.0


def body_of(path: str, **more: Any) -> dict[str, Any]:
    return sound(path, stream=True, **{"max_tokens": TOKENS, **more})


def events(answer: httpx.Response) -> list[Event]:
    assert answer.status_code == 200, answer.text
    told = [event.split("\n", 1) for event in answer.text.split("\n\n") if event]
    return [(lines[0].removeprefix("id: "), lines[1]) if lines[0].startswith("id: ") else ("", "\n".join(lines))
            for lines in told]  # fmt: skip


def text(told: list[Event]) -> str:
    """All that the events say, tokens and ends."""
    said = ""
    for _, event in told:
        payload = event.partition("data: ")[2]
        document = json.loads(payload) if payload.startswith("{") else {}
        choice = (document.get("choices") or [{}])[0]
        delta = choice.get("delta") or document.get("delta") or {}
        said += choice.get("text") or delta.get("content") or delta.get("text") or ""
        end = choice.get("finish_reason") or delta.get("stop_reason")
        said += f"<{end}>" if end else ""
        said += "<role>" if delta.get("role") or "message_start" in event else ""
    return said


def resume(ingress: Ingress, path: str, last_id: str, **more: Any) -> httpx.Response:
    return ingress.post(path, body_of(path, **more), [("last-event-id", last_id)])


def keep(ingress: Ingress, tokens: int, finish: str = "") -> None:
    """Have the replica keep the first ``tokens`` of the latest stream, made at the pace of one in 10 ms."""
    times_s = tuple(0.01 * (i + 1) for i in range(tokens))
    key = ingress.transport.submitted[-1].resume_key
    assert key
    ingress.transport.kept = {key: KeptStream(MADE[:tokens], times_s, 1.0, 2.0, finish)}


def counted(ingress: Ingress, how: str) -> float:
    registry = ingress.ingress_app.metrics.registry
    return registry.get_sample_value("polyslo_streams_resumed_total", {"how": how}) or 0.0


def end_of(event_id: str) -> int:
    return int(event_id.split(":")[2])


@pytest.mark.parametrize("path", PATHS)
def test_ids_are_given_only_to_who_asks(ingress: Ingress, path: str) -> None:
    plain = ingress.post(path, body_of(path))
    assert "id: " not in plain.text.replace('"id: ', "")
    assert "x-stream-resume" not in plain.headers
    assert not ingress.transport.submitted[-1].resume_key
    asked = ingress.post(path, body_of(path), [ASKED])
    assert asked.headers["x-stream-resume"] == "1"
    told = events(asked)
    assert text(told) == text(events(plain))
    ids = [event_id for event_id, _ in told]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    assert end_of(ids[-1]) == TOKENS
    assert ids[-1].endswith(":a"), "the replica that has it"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ahead", [0, 1, 5, TOKENS], ids="{}-ahead".format)
def test_the_rest_follows_whatever_was_last(ingress: Ingress, path: str, ahead: int) -> None:
    """After each event; the replica may have made more than the client has, or all."""
    told = events(ingress.post(path, body_of(path), [ASKED]))
    first = ingress.transport.submitted[-1]
    whole = text(told)
    for place, (last_id, _) in enumerate(told[:-1]):
        ingress.transport.submitted[:] = [first]
        made = min(end_of(last_id) + ahead, TOKENS)
        keep(ingress, made, "length" if made == TOKENS else "")
        answer = resume(ingress, path, last_id)
        assert text(told[: place + 1]) + text(events(answer)) == whole, last_id
        assert events(answer)[-1][0].endswith(":a")
        going_on = ingress.transport.submitted[1:]
        assert [(each.emitted_tokens, each.sent_tokens) for each in going_on] == (
            [(made, MADE[:made])] if made < TOKENS else []
        )
        assert all(each.resume_key == first.resume_key for each in going_on)
        assert not ingress.client.replays._cutters
        assert not ingress.client.dispatcher.requests


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("step", [1, 3, 4, TOKENS])
def test_what_is_kept_nowhere_is_made_again(ingress: Ingress, path: str, step: int) -> None:
    """Cut into other pieces than before."""
    told = events(ingress.post(path, body_of(path, temperature=0), [ASKED]))
    whole, before = text(told), counted(ingress, "recomputed")
    ingress.transport.step = step
    try:
        for place, (last_id, _) in enumerate(told):
            answer = resume(ingress, path, last_id, temperature=0)
            assert text(told[: place + 1]) + text(events(answer)) == whole, last_id
            assert ingress.transport.submitted[-1].emitted_tokens == 0
    finally:
        ingress.transport.step = 4
    assert counted(ingress, "recomputed") == before + len(told)


def test_a_resumed_stream_may_be_resumed(ingress: Ingress) -> None:
    path = PATHS[0]
    told = events(ingress.post(path, body_of(path), [ASKED]))
    first = ingress.transport.submitted[-1]
    keep(ingress, 6)
    again = events(resume(ingress, path, told[0][0]))
    ingress.transport.submitted[:] = [first]
    keep(ingress, 9)
    rest = events(resume(ingress, path, again[0][0]))
    assert text(told[:1]) + text(again[:1]) + text(rest) == text(told)


@pytest.mark.parametrize(
    "others", [{"max_tokens": 13}, {"prompt": "ho"}, {"user": "b"}], ids=lambda others: next(iter(others))
)
def test_another_request_gets_nothing_of_a_stream(ingress: Ingress, others: dict[str, Any]) -> None:
    path = PATHS[0]
    told = events(ingress.post(path, body_of(path), [ASKED]))
    keep(ingress, 6)
    before = counted(ingress, "gone")
    answer = resume(ingress, path, told[0][0], **others)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "stream_gone")
    assert len(ingress.transport.kept) == 1, "it is still there for its own client"
    assert counted(ingress, "gone") == before + 1
    assert resume(ingress, path, told[0][0]).status_code == 200
    assert resume(ingress, path, told[0][0]).status_code == 410, "the replica has it no longer"


def test_a_replica_that_does_not_answer_loses_no_stream(ingress: Ingress) -> None:
    """Only what the replica says is gone is gone. What can be computed again need not wait."""
    path, before = PATHS[0], counted(ingress, "unanswered")
    told = events(ingress.post(path, body_of(path), [ASKED]))
    keep(ingress, 6)
    ingress.transport.is_mute = True
    answer = resume(ingress, path, told[0][0])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stream_unanswered")
    assert (answer.headers["retry-after"], counted(ingress, "unanswered")) == ("1", before + 1)
    ingress.transport.is_mute = False
    assert text(told[:1]) + text(events(resume(ingress, path, told[0][0]))) == text(told)
    told = events(ingress.post(path, body_of(path, seed=1), [ASKED]))
    ingress.transport.is_mute = True
    assert text(told[:1]) + text(events(resume(ingress, path, told[0][0], seed=1))) == text(told)


def test_another_key_gets_nothing_of_a_stream(ingress: Ingress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress.ingress_app.middleware, "has_tenants", True)
    path, own = PATHS[0], ("authorization", "Bearer own")
    told = events(ingress.post(path, body_of(path), [ASKED, own]))
    keep(ingress, 6)
    last_id = ("last-event-id", told[0][0])
    for headers in ([last_id, ("authorization", "Bearer other")], [last_id]):
        assert ingress.post(path, body_of(path), headers).status_code == 410
    assert ingress.post(path, body_of(path), [last_id, own]).status_code == 200


def edited(place: int, word: str) -> Callable[[str], str]:
    def edit(event_id: str) -> str:
        parts = event_id.split(":")
        parts[place] = word
        return ":".join(parts)

    return edit


@pytest.mark.parametrize("edit", [edited(0, "0" * 32), edited(4, "0" * 16), edited(2, "9"), edited(5, "elsewhere")])
def test_an_id_that_was_not_given_finds_nothing(ingress: Ingress, edit: Callable[[str], str]) -> None:
    path = PATHS[0]
    told = events(ingress.post(path, body_of(path), [ASKED]))
    keep(ingress, 12)
    assert resume(ingress, path, edit(told[0][0])).status_code == 410


@pytest.mark.parametrize("edit", [lambda _: "7", edited(0, "x"), edited(1, "-1"), edited(1, "9"), edited(3, "0")])
def test_an_id_that_is_none_is_a_mistake(ingress: Ingress, edit: Callable[[str], str]) -> None:
    path = PATHS[0]
    told = events(ingress.post(path, body_of(path), [ASKED]))
    answer = resume(ingress, path, edit(told[0][0]))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "last-event-id")


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (PATHS[0], {"stream": False}),
        (PATHS[0], {"n": 2}),
        (PATHS[0], {"logprobs": 0}),
        (PATHS[1], {"logprobs": True}),
        ("/v1/responses", {}),
    ],
)
def test_what_cannot_be_resumed_says_so(ingress: Ingress, path: str, more: dict[str, Any]) -> None:
    body = sound(path, stream=True) | more
    plain = ingress.post(path, body, [ASKED])
    assert plain.status_code == 200
    assert "x-stream-resume" not in plain.headers
    assert not ingress.transport.submitted[-1].resume_key
    answer = ingress.post(path, body, [("last-event-id", f"{'0' * 32}:0:1:1:{'0' * 16}:a")])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "last-event-id")


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_becomes_another_one_ends_with_the_reason(ingress: Ingress, path: str) -> None:
    told = events(ingress.post(path, body_of(path, seed=1), [ASKED]))
    before = counted(ingress, "diverged")
    answer = events(resume(ingress, path, edited(4, "0" * 16)(told[1][0]), seed=1))
    (event_id, event), *rest = answer
    error = json.loads(event.partition("data: ")[2])["error"]
    assert "computed again, it became another one" in error["message"]
    assert event_id == "", "so that the client's last id stays"
    assert path == "/v1/messages" or error["code"] == "stream_diverged"
    assert rest in ([], [("", "data: [DONE]")])
    assert counted(ingress, "diverged") == before + 1
    assert not ingress.client.dispatcher.requests


def test_a_stream_that_ends_too_early_has_become_another_one(ingress: Ingress) -> None:
    path = PATHS[0]
    told = events(ingress.post(path, body_of(path, seed=1), [ASKED]))
    beyond = edited(2, str(TOKENS + 3))(told[-1][0])
    assert "became another one" in resume(ingress, path, beyond, seed=1).text


def test_a_resumed_stream_is_judged_by_when_its_tokens_were_made(ingress: Ingress) -> None:
    """On time at its first ingress, and late where the rest comes seconds after it was due; no promise is counted."""
    path, slo = PATHS[0], ("x-slo-tpot-ms", "150")
    told = events(ingress.post(path, body_of(path), [ASKED, ("x-slo-ttft-ms", "2000"), slo]))
    key = ingress.transport.submitted[-1].resume_key
    promises = ingress.ingress_app.metrics.registry.get_sample_value
    before = promises("polyslo_promises_total", {"tier": "standard"})
    for age_s, met in ((1.0, True), (60.0, False)):
        times_s = tuple(0.5 + 0.1 * i for i in range(6))
        ingress.transport.kept = {key: KeptStream(MADE[:6], times_s, age_s, 2.0)}
        ingress.transport.outcomes.clear()
        headers = [("last-event-id", told[0][0]), ("x-slo-ttft-ms", "2000"), slo]
        final = next(json.loads(event[6:]) for _, event in events(ingress.post(path, body_of(path), headers))
                     if '"slo"' in event)  # fmt: skip
        assert (final["slo"]["met"], final["slo"]["resumed"]) == (met, 1)
        assert final["slo"]["ttft_ms"] == 500.0
        assert final["slo"]["e2e_ms"] >= 1000 * age_s
        (outcome,) = ingress.transport.outcomes
        assert (outcome.met, outcome.is_promised, outcome.output_tokens) == (met, False, TOKENS)
    assert promises("polyslo_promises_total", {"tier": "standard"}) == before


def test_a_complete_stream_is_counted_too(ingress: Ingress) -> None:
    path = PATHS[0]
    told = events(ingress.post(path, body_of(path), [ASKED]))
    keep(ingress, TOKENS, "length")
    ingress.transport.outcomes.clear()
    resume(ingress, path, told[0][0])
    (outcome,) = ingress.transport.outcomes
    assert (outcome.finish, outcome.verdict, outcome.output_tokens) == ("length", Verdict.UNCHECKED, TOKENS)


def test_a_stream_that_goes_on_is_never_refused_but_one_that_is_made_again_may_be(ingress: Ingress) -> None:
    path = PATHS[0]
    told = events(ingress.post(path, body_of(path, temperature=0), [ASKED]))
    ingress.transport.decide = refused
    assert resume(ingress, path, told[0][0], temperature=0).status_code == 429


def test_a_wrong_header_is_a_mistake(ingress: Ingress) -> None:
    answer = ingress.post(PATHS[0], body_of(PATHS[0]), [("x-stream-resume", "perhaps")])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-stream-resume")
