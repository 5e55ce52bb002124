"""What a guard has no place for is counted, although no ingress has seen it."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from serving.config.limits import GuardConfig
from serving.ingress import turned_away
from serving.ingress.asgi import App, Message, Receive, Send, send_json
from serving.ingress.guard import OPEN_FILES, Guard
from serving.ingress.metrics import IngressMetrics
from serving.ingress.models_metrics import metrics_app

FULL, OF_CLIENT = (f'polyslo_rejected_total{{reason="{code}",tier=""}} 1.0' for code in turned_away.counts)
LIMITS = GuardConfig(most_requests=3, requests_per_client=2, body_bytes=10)


@pytest.fixture(autouse=True)
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The process's, from 0 on."""
    fresh = dict.fromkeys(turned_away.counts, 0)
    monkeypatch.setattr(turned_away, "counts", fresh)
    return fresh


def statuses(keys: str, path: str = "/v1/completions", body: bytes = b"{}") -> list[int]:
    """Of requests with these API keys that come while none of them has been answered, in the order of answers."""
    goes, told, held = asyncio.Event(), list[int](), list[str]()

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        held.append(scope["path"])
        await goes.wait()
        await send_json(send, 200, {})

    async def ask(client: httpx.AsyncClient, key: str) -> None:
        told.append((await client.post(path, content=body, headers={"x-api-key": key})).status_code)

    async def play() -> None:
        transport = httpx.ASGITransport(Guard(app, LIMITS))
        async with httpx.AsyncClient(transport=transport, base_url="http://ingress", timeout=30) as client:
            asking = [asyncio.ensure_future(ask(client, key)) for key in keys]
            async with asyncio.timeout(10):
                while len(held) + len(told) < len(keys):
                    await asyncio.sleep(0)
            goes.set()
            await asyncio.gather(*asking)

    asyncio.run(play())
    return told


def shown(app: App) -> str:
    """The text that Prometheus gets."""

    async def ask() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingress") as client:
            return (await client.get("/metrics")).text

    return asyncio.run(ask())


def one_model() -> App:
    return IngressMetrics("tiny").to_app()


def two_models() -> App:
    """Neither of which the refusals are told of."""
    return metrics_app([IngressMetrics("chat"), IngressMetrics("code")])


@pytest.mark.parametrize("made", [one_model, two_models])
def test_what_finds_no_place_counts_among_refusals_without_a_tier(made: Callable[[], App]) -> None:
    app = made()
    assert FULL.replace("1.0", "0.0") in shown(app), "from the start, so that a rate sees the first one"
    assert statuses("aaabc") == [429, 503, 200, 200, 200]
    text = shown(app)
    assert FULL in text
    assert OF_CLIENT in text
    assert text.count("# TYPE polyslo_rejected_total counter") == 1


def test_refusals_of_tiers_stay_beside_them() -> None:
    metrics = IngressMetrics("tiny")
    metrics.rejected.labels("gold", "kv_full").inc()
    text = shown(metrics.to_app())
    assert 'polyslo_rejected_total{reason="kv_full",tier="gold"} 1.0' in text
    assert FULL.replace("1.0", "0.0") in text


def test_a_mistake_of_the_client_is_no_refusal(counts: dict[str, int]) -> None:
    assert statuses("a", body=b"x" * 11) == [413]
    assert set(counts.values()) == {0}


def test_a_file_too_many_counts(counts: dict[str, int]) -> None:
    """Those on their way have not had their time yet."""

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def play() -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        guard = Guard(one_model(), GuardConfig())
        scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": []}
        begun = [asyncio.ensure_future(guard(dict(scope), never, send)) for _ in range(OPEN_FILES)]
        await asyncio.sleep(0)
        await guard(dict(scope), never, send)
        for each in begun:
            each.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        return sent

    assert asyncio.run(play())[0]["status"] == 503
    assert counts == {turned_away.QUEUE_FULL: 1, turned_away.CLIENT_REQUESTS: 0}
