"""An ASGI client that sends what no library would send, and a replica that answers as an engine does."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from protocol.messages import Outputs, Submission
from replicas.vllm_codec import decode_request, encode_output
from tests.support.ingress_scene import OneReplica

MOST_TOKENS = 40  # the replica ends what asks for more by itself, as a model does
ENGINE_STEP_TOKENS = 8
VOCABULARY = 258  # of the embedded model


@dataclass(frozen=True)
class Case:
    """One request as its bytes; ``leaves``: its client goes away after so many messages of the answer."""

    path: str
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)
    method: str = "POST"
    chunks: int = 1
    leaves: int | None = None
    is_overloaded: bool = False  # the controller refuses where a tier refuses


@dataclass
class Answer:
    """What the client saw; status 0 where it left before."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    is_complete: bool = False

    @property
    def kind(self) -> bytes:
        return dict(self.headers).get(b"content-type", b"").partition(b";")[0]


class ModelReplica(OneReplica):
    """The replica of the scene, with logprobs for those who ask and an end of its own."""

    def answer(self, submission: Submission) -> None:
        request = decode_request(submission.payload)
        params, prompt = request.sampling_params, request.prompt_token_ids or []
        assert params is not None
        count = min(submission.max_tokens, MOST_TOKENS)
        tokens = [ord("a") + i % 26 for i in range(count)]
        for start in range(0, count, ENGINE_STEP_TOKENS):
            part = tokens[start : start + ENGINE_STEP_TOKENS]
            output = EngineCoreOutput(submission.request_id, part)
            if start + len(part) == count:
                output.finish_reason = FinishReason.LENGTH if count == submission.max_tokens else FinishReason.STOP
            if params.num_logprobs is not None:
                output.new_logprobs = _logprobs(part, params.num_logprobs)
            if start == 0 and params.prompt_logprobs is not None:
                output.new_prompt_logprobs_tensors = _prompt(prompt[1:], params.prompt_logprobs)
            self._queue.put_nowait(Outputs(start, True, (encode_output(output),)))


def _logprobs(tokens: list[int], asked: int) -> LogprobsLists:
    ids, values, ranks = _columns(np.array(tokens), asked)
    return LogprobsLists(ids, values, ranks)


def _prompt(tokens: list[int], asked: int) -> LogprobsTensors:
    return LogprobsTensors(*map(_tensor, _columns(np.array(tokens, dtype=np.int64), asked)))


def _tensor(column: np.ndarray) -> torch.Tensor:
    """As engines make it: contiguous where it is empty too (a prompt of one token), or vLLM cannot encode it."""
    return torch.zeros(column.shape, dtype=torch.from_numpy(column).dtype).copy_(torch.from_numpy(column))


def _columns(tokens: np.ndarray, asked: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each token itself and of ``asked`` others; -1: of all."""
    others = np.arange(VOCABULARY if asked < 0 else asked)
    ids = np.column_stack([tokens, np.tile(others, (len(tokens), 1))]).astype(np.int32)
    return ids, np.full(ids.shape, -1.0, np.float32), np.ones(len(tokens), np.int32)


async def call(app: Any, case: Case) -> Answer:
    """The answer of ``app``; what it raises is raised."""
    answer, parts, over = Answer(), _split(case.body, case.chunks), asyncio.Event()
    sent = 0

    async def receive() -> dict[str, Any]:
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal sent
        sent += 1
        if message["type"] == "http.response.start":
            assert not answer.status, "a second response began"
            answer.status, answer.headers = message["status"], list(message.get("headers", []))
        elif message["type"] == "http.response.body":
            assert answer.status, "a body without a beginning"
            answer.body += message.get("body", b"")
            answer.is_complete = not message.get("more_body", False)
        if answer.is_complete or (case.leaves is not None and sent > case.leaves):
            over.set()

    if case.leaves == 0:
        asyncio.get_running_loop().call_soon(over.set)
    await app(_scope(case), receive, send)
    return answer


def _split(body: bytes, chunks: int) -> list[bytes]:
    size = max(1, -(-len(body) // chunks))
    return [body[start : start + size] for start in range(0, len(body), size)] or [b""]


def _scope(case: Case) -> dict[str, Any]:
    path, _, query = case.path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": case.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in case.headers],
        "client": ("127.0.0.1", 40000),
        "server": ("ingress", 80),
        "state": {},
        "extensions": {},
    }


def events(body: bytes) -> list[Any]:
    """The JSON documents of a stream of server-sent events, ``[DONE]`` as it is."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    return ["[DONE]" if line == b"[DONE]" else strict_json(line) for line in lines]


def strict_json(text: bytes) -> Any:
    """JSON as other languages read it; raises ``ValueError`` also for NaN and infinities."""

    def refuse(word: str) -> Any:
        raise ValueError(f"not JSON: {word}")

    return json.loads(text, parse_constant=refuse)


def complaint(case: Case, answer: Answer) -> str:
    """What is wrong with an answer whatever was asked; empty where nothing is."""
    if answer.status >= 500 or answer.status == 0:
        return f"status {answer.status}"
    if not answer.is_complete:
        return "the response does not end"
    if any(b"\n" in value or b"\r" in value for _, value in answer.headers):
        return "a header with a line break"
    try:
        documents = [strict_json(answer.body)] if answer.kind == b"application/json" else []
        documents += events(answer.body) if answer.kind == b"text/event-stream" else []
    except ValueError as error:
        return f"not JSON: {error}"
    if answer.status >= 400 and not documents and case.method != "HEAD":
        return f"an error without a document: {answer.body[:80]!r}"
    return next(filter(None, (_complaint_on(case.path, answer.status, document) for document in documents)), "")


def _complaint_on(path: str, status: int, document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    if error is None:
        return "an error without the key error" if status >= 400 else _cut_off(document)
    if path.startswith("/v1/messages"):
        shape = {"type", "message"} <= error.keys() and document.get("type") == "error"
        return "" if shape else f"not Anthropic's shape: {document}"
    if not isinstance(error, dict) or error.keys() != {"message", "type", "param", "code"}:
        return f"not OpenAI's four keys: {error}"
    is_sound = isinstance(error["message"], str) and isinstance(error["code"], str | None)
    if "Internal" in str(error["type"]):
        return f"an internal error inside a stream: {error}"
    return "" if is_sound else f"wrong types: {error}"


def _cut_off(document: Any) -> str:
    """Of a request that was taken as a whole, no sequence is given up."""
    choices = document.get("choices", ()) if isinstance(document, dict) else ()
    reasons = {choice.get("finish_reason") for choice in choices if isinstance(choice, dict)}
    return "a sequence was given up inside an answer" if "abort" in reasons else ""
