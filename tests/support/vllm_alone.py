"""Greedy requests to vLLM's own server, and the order in which they end."""

import threading
from collections.abc import Mapping
from typing import Any

import httpx

from benchmarks.vllm_alone import MODEL


class Crowd:
    """Greedy requests in the background: their texts, and the order in which they ended."""

    def __init__(self, url: str) -> None:
        self.url, self.texts, self.ended = url, dict[str, str](), list[str]()
        self._client = httpx.Client(timeout=240, limits=httpx.Limits(max_connections=64))
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def send(self, name: str, prompt: str, tokens: int, headers: Mapping[str, str] | None = None, **more: Any) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}

        def ask() -> None:
            answer = self._client.post(f"{self.url}/v1/completions", json=body, headers=headers)
            with self._lock:
                self.texts[name] = answer.json()["choices"][0]["text"] if answer.is_success else answer.text
                self.ended.append(name)

        self._threads.append(threading.Thread(target=ask))
        self._threads[-1].start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(300)
            assert not thread.is_alive(), "a request did not end"

    def close(self) -> None:
        self._client.close()
