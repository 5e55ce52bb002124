"""Batches as OpenAI's own client meets them, through vLLM's real server; plain functions in place of engines."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from serving.batches import api as api_module
from serving.batches import open_batch, runner
from serving.batches.book import BatchBook
from serving.batches.objects import BatchError
from serving.config.batches import BatchOptions
from serving.ingress.asgi import Message, Receive, Send, send_json
from tests.support.batches_scene import api_of, client_of, jsonl, line, served, until, wanted
from tests.support.ingress_scene import Ingress, refused

pytest.importorskip("vllm")

KEYS = ["first", "second"]


@pytest.fixture(scope="module")
def ingress() -> Iterator[Ingress]:
    with Ingress(model={"id": "embedded", "server_kwargs": {"api_key": KEYS}}, batches={"storage": "/unused"}) as made:
        yield made


@pytest.fixture(autouse=True)
def _fresh(ingress: Ingress) -> None:
    ingress.reset()


@pytest.fixture
def book(tmp_path: Path) -> BatchBook:
    return BatchBook(BatchOptions(str(tmp_path)), "app")


async def begun(client: openai.AsyncOpenAI, *lines: dict[str, Any]) -> Any:
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    asked: Any = wanted(file.id)
    return await client.batches.create(**asked, metadata={"for": "a test"})


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async def is_so() -> bool:
        return (await client.batches.retrieve(batch_id)).status != "in_progress"

    await until(is_so)
    return await client.batches.retrieve(batch_id)


async def results(client: openai.AsyncOpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


def test_a_batch_is_served_best_effort_for_its_tenant(ingress: Ingress, book: BatchBook) -> None:
    async def play() -> None:
        api = api_of(ingress, book, has_tenants=True)
        asked = [line(str(i), slo={"ttft_ms": 1}, service_tier="priority") for i in range(20)]
        async with client_of(api, KEYS[0]) as client, served(api, book):
            batch = await ended(client, (await begun(client, *asked, line("bad", max_tokens=-1))).id)
            assert batch.status == "completed"
            assert (batch.request_counts.completed, batch.request_counts.failed) == (20, 1)
            assert batch.metadata == {"for": "a test"}
            good = await results(client, batch.output_file_id)
            (bad,) = await results(client, batch.error_file_id)
        assert [each["custom_id"] for each in good] == [str(i) for i in range(20)]
        body = good[0]["response"]["body"]
        assert body["choices"][0]["text"] == "abcd"
        assert (body["service_tier"], body["slo"]["tier"]) == ("flex", "batch")
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
        assert "max_tokens" in bad["response"]["body"]["error"]["message"]

    ingress.run(play())
    assert {ask.slo.best_effort for ask in ingress.transport.admissions} == {True}
    (tenant,) = {ask.tenant for ask in ingress.transport.admissions}
    assert tenant


def test_keys_are_asked_for_and_tenants_kept_apart(ingress: Ingress, book: BatchBook) -> None:
    async def play() -> None:
        api = api_of(ingress, book, has_tenants=True)
        async with client_of(api, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.files.list()
            with pytest.raises(openai.AuthenticationError):
                await stranger.files.create(file=b"x", purpose="batch")
        async with client_of(api, KEYS[0]) as first, client_of(api, KEYS[1]) as second:
            batch = await begun(first, line("a"))
            assert [each.id for each in (await first.batches.list()).data] == [batch.id]
            assert (await second.batches.list()).data == (await second.files.list()).data == []
            for question in (second.batches.retrieve(batch.id), second.files.content(batch.input_file_id)):
                with pytest.raises(openai.NotFoundError):
                    await question

    ingress.run(play())
    assert book.files


def test_a_tenant_of_another_models_keys_is_served_nothing(ingress: Ingress, book: BatchBook) -> None:
    """Where several models have keys of their own, a batch reaches no model that its tenant could not ask."""

    async def play() -> None:
        api = api_of(ingress, book, has_tenants=True)
        async with client_of(api, KEYS[0]) as client, served(api, book):
            batch_id = (await begun(client, line("a"))).id
            book.batches[batch_id].tenant = "stranger"

            async def is_over() -> bool:
                return book.batches[batch_id].state == "completed"

            await until(is_over)
            assert (book.batches[batch_id].completed, book.batches[batch_id].failed) == (0, 1)

    ingress.run(play())
    assert ingress.transport.submitted == []


def test_a_line_that_an_engine_fails_with_is_tried_again(
    ingress: Ingress, book: BatchBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_pause_s", lambda *_: 0.01)
    answers = {"a": [503, 500, 503, 500, 200], "b": [500, 500, 500]}
    asked: dict[str, int] = dict.fromkeys(answers, 0)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        name = json.loads((await receive())["body"])["prompt"]
        asked[name] += 1
        await send_json(send, answers[name][asked[name] - 1], {"asked": asked[name]})

    async def play() -> None:
        api = api_of(ingress, book, has_tenants=True)
        async with client_of(api, KEYS[0]) as client:
            batch_id = (await begun(client, line("a", prompt="a"), line("b", prompt="b"))).id
            api.app = app
            async with served(api, book):

                async def is_over() -> bool:
                    return book.batches[batch_id].state == "completed"

                await until(is_over)
            assert (book.batches[batch_id].completed, book.batches[batch_id].failed) == (1, 1)

    ingress.run(play())
    assert asked == {"a": 5, "b": 3}


def test_long_files_are_read_and_sent_in_pieces(
    ingress: Ingress, book: BatchBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "PIECE", 1000)
    content = jsonl(*(line(str(i), prompt="x" * 100) for i in range(2000)))
    assert len(content) > 3 * api_module.CUT

    async def play() -> None:
        async with client_of(api_of(ingress, book), KEYS[0]) as client:
            file = await client.files.create(file=("in.jsonl", content), purpose="batch")
            assert (await client.files.content(file.id)).content == content

    ingress.run(play())


def test_a_file_that_cannot_be_read_now_is_a_503(
    ingress: Ingress, book: BatchBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> bytes:
        raise BatchError(503, "The storage of batches fails at present.", None, "batches_unavailable")

    async def play() -> None:
        async with client_of(api_of(ingress, book), KEYS[0]) as client:
            file = await client.files.create(file=jsonl(line("a")), purpose="batch")
            monkeypatch.setattr(book, "content", fails)
            with pytest.raises(openai.InternalServerError) as error:
                await client.files.content(file.id)
            assert (error.value.status_code, error.value.code) == (503, "batches_unavailable")

    ingress.run(play())


def test_files_are_listed_read_and_removed(ingress: Ingress, book: BatchBook) -> None:
    async def play() -> None:
        async with client_of(api_of(ingress, book), KEYS[0]) as client:
            file = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
            assert (file.filename, file.purpose, file.bytes) == ("in.jsonl", "batch", len(jsonl(line("a"))))
            assert [each.id for each in (await client.files.list(purpose="batch")).data] == [file.id]
            assert (await client.files.retrieve(file.id)).id == file.id
            assert (await client.files.content(file.id)).content == jsonl(line("a"))
            assert (await client.files.delete(file.id)).deleted
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(file.id)

    ingress.run(play())


def test_mistakes_are_told(ingress: Ingress, book: BatchBook) -> None:
    async def play() -> None:
        async with client_of(api_of(ingress, book), KEYS[0]) as client:
            batch = await begun(client, line("a"), line("a"))
            assert (batch.status, batch.errors.data[0].code, batch.errors.data[0].line) == (
                "failed", "duplicate_custom_id", 2
            )  # fmt: skip
            file = await client.files.create(file=jsonl(line("a")), purpose="batch")
            for change, param in (
                ({"endpoint": "/v1/embeddings"}, "endpoint"),
                ({"completion_window": "1h"}, "completion_window"),
                ({"metadata": {"a": 1}}, "metadata"),
                ({"input_file_id": 3}, "input_file_id"),
            ):
                with pytest.raises(openai.BadRequestError) as error:
                    await client.post("/batches", body={**wanted(file.id), **change}, cast_to=object)
                assert error.value.param == param
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.post("/batches", body=wanted("file-x"), cast_to=object)
            assert unknown.value.param == "input_file_id"
            with pytest.raises(openai.BadRequestError) as error:
                await client.files.create(file=b"x", purpose="fine-tune")
            assert error.value.param == "purpose"
            for change, param in (({"limit": 0}, "limit"), ({"order": "x"}, "order"), ({"after": "file-x"}, "after")):
                with pytest.raises(openai.BadRequestError) as error:
                    await client.get("/files", options={"params": change}, cast_to=object)
                assert error.value.param == param
            broken = {"content-type": "multipart/form-data", "authorization": f"Bearer {KEYS[0]}"}
            answer = await client._client.post("http://ingress/v1/files", content=b"x", headers=broken)
            assert (answer.status_code, "no form" in answer.json()["error"]["message"]) == (400, True)
            answer = await client._client.post("http://ingress/x/v1/files", content=b"x", headers=broken)
            assert answer.status_code == 404, "only one path takes files"
            with pytest.raises(openai.NotFoundError, match="No route PUT"):
                await client.put("/batches/x", body={}, cast_to=object)

    ingress.run(play())


def test_a_file_that_is_lost_from_the_storage_is_a_404(ingress: Ingress, book: BatchBook) -> None:
    async def play() -> None:
        async with client_of(api_of(ingress, book), KEYS[0]) as client:
            file = await client.files.create(file=jsonl(line("a")), purpose="batch")
            book._storage.remove(f"files/{file.id}")
            for param, question in (
                ("input_file_id", client.post("/batches", body=wanted(file.id), cast_to=object)),
                ("file_id", client.files.content(file.id)),
            ):
                with pytest.raises(openai.NotFoundError) as error:
                    await question
                assert (error.value.param, error.value.code) == (param, "file_lost")

    ingress.run(play())


def test_without_storage_batches_are_off(ingress: Ingress) -> None:
    async def play() -> None:
        async with client_of(api_of(ingress, None), KEYS[0]) as client:
            with pytest.raises(openai.NotFoundError, match=r"set batches\.storage"):
                await client.batches.list()
            assert (await client.models.list()).data

    ingress.run(play())


def test_a_full_fleet_is_asked_again(ingress: Ingress, book: BatchBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_pause_s", lambda *_: 0.05)
    monkeypatch.setattr(open_batch, "REST_S", 0.1)
    ingress.transport.decide = refused

    async def play() -> None:
        api = api_of(ingress, book, has_tenants=True)
        async with client_of(api, KEYS[0]) as client, served(api, book):
            batch = await begun(client, line("a"))
            await asyncio.sleep(1.0)
            assert (await client.batches.retrieve(batch.id)).status == "in_progress"
            ingress.reset()
            assert (await ended(client, batch.id)).request_counts.completed == 1

    ingress.run(play())


def test_a_cancelled_batch_ends_its_requests(ingress: Ingress, book: BatchBook) -> None:
    ingress.transport.holds = True

    async def play() -> None:
        api = api_of(ingress, book, has_tenants=True)
        async with client_of(api, KEYS[0]) as client, served(api, book, in_flight=2):
            batch = await begun(client, *(line(str(i)) for i in range(5)))

            async def is_sent() -> bool:
                return len(ingress.transport.submitted) == 2

            await until(is_sent)
            assert (await client.batches.cancel(batch.id)).status == "cancelled"

            async def is_aborted() -> bool:
                return len(ingress.transport.aborted) == 2

            await until(is_aborted)

    ingress.run(play())
    assert len(ingress.transport.submitted) == 2
