"""The client of ``benchmarks.front_path``: streamed completions in a closed loop, at little processor time of its own.

    python -m benchmarks.front_load HOST PORT STREAMS WARM_S SECONDS

Prints a line when the measured window begins and one when it ends, so that others can read processor times there, and
then the figures as JSON. It reads no event but the first and the last one of a stream.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from typing import NamedTuple

import uvloop

PROMPT_TOKENS, OUTPUT_TOKENS = 200, 256
BEGIN, END = "begin", "end"  # the lines around the window
EVENT, LAST = b"data: {", b"data: [DONE]"
PATIENCE_S = 120.0  # for one stream


class Record(NamedTuple):
    """One finished stream, in seconds of this process's clock."""

    sent_s: float
    first_s: float
    last_s: float


class Stream(asyncio.Protocol):
    """One connection on which requests follow each other."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._end: asyncio.Future[float] | None = None
        self._first_s, self._tail, self.events = 0.0, b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_exception(ConnectionError("the server closed the connection"))

    async def ask(self, head: bytes, body: bytes) -> Record:
        """Send one request and wait for the end of its stream; raises where it is not one."""
        assert self._transport is not None
        self._first_s, self._tail = 0.0, b""
        self._end = asyncio.get_running_loop().create_future()
        sent_s = time.monotonic()
        self._transport.write(head + body)
        last_s = await asyncio.wait_for(self._end, PATIENCE_S)
        return Record(sent_s, self._first_s, last_s)

    def data_received(self, data: bytes) -> None:
        if self._end is None or self._end.done():
            return
        seen, self._tail = self._tail + data, data[-len(LAST) - 5 :]  # with the line end and the last chunk's length
        self.events += data.count(EVENT)
        if not self._first_s:
            if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
                self._end.set_exception(RuntimeError(data[:400].decode(errors="replace")))
            elif EVENT in seen:
                self._first_s = time.monotonic()
        if seen.endswith(b"\r\n0\r\n\r\n"):
            self._end.set_result(time.monotonic())


def request(rng: random.Random, host: str) -> tuple[bytes, bytes]:
    """Head and body of a completion of ``OUTPUT_TOKENS`` after ``PROMPT_TOKENS`` token ids."""
    prompt = [rng.randrange(10, 200) for _ in range(PROMPT_TOKENS)]
    asked = {"model": "embedded", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode(), body


async def load(host: str, port: int, streams: int, warm_s: float, seconds: float) -> dict[str, float]:
    """``streams`` clients; streams that run beyond the window count with the part of their tokens within it."""
    loop, records = asyncio.get_running_loop(), list[Record]()
    begin_s = time.monotonic() + warm_s
    end_s = begin_s + seconds
    connections: list[Stream] = []

    async def client(seed: int) -> None:
        rng = random.Random(seed)
        transport, connection = await loop.create_connection(Stream, host, port)
        connections.append(connection)
        while time.monotonic() < end_s:
            records.append(await connection.ask(*request(rng, host)))
        transport.close()

    async def tell() -> tuple[int, int]:
        counts = []
        for at_s, word in ((begin_s, BEGIN), (end_s, END)):
            await asyncio.sleep(at_s - time.monotonic())
            counts.append(sum(connection.events for connection in connections))
            print(word, flush=True)
        return counts[0], counts[1]

    telling = asyncio.create_task(tell())
    await asyncio.gather(*(client(seed) for seed in range(streams)))
    before, after = await telling
    tokens = sum(tokens_within(record, begin_s, end_s) for record in records)
    ttfts = [record.first_s - record.sent_s for record in records if begin_s <= record.first_s < end_s]
    gaps = [(r.last_s - r.first_s) / (OUTPUT_TOKENS - 1) for r in records if r.last_s > begin_s and r.first_s < end_s]
    return {
        "requests": len(records),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "tokens_per_event": tokens / max(1, after - before),
        "ttft_ms_p50": statistics.median(ttfts) * 1000.0 if ttfts else 0.0,
        "tpot_ms_p50": statistics.median(gaps) * 1000.0,
    }


def tokens_within(record: Record, begin_s: float, end_s: float) -> float:
    """Tokens of a stream that came in a window, taken as evenly spread from its first to its last one."""
    lasted_s = max(record.last_s - record.first_s, 1e-9)
    within_s = min(record.last_s, end_s) - max(record.first_s, begin_s)
    return OUTPUT_TOKENS * min(1.0, max(0.0, within_s / lasted_s))


if __name__ == "__main__":
    host, port, streams, warm_s, seconds = sys.argv[1:]
    print(json.dumps(uvloop.run(load(host, int(port), int(streams), float(warm_s), float(seconds)))), flush=True)
