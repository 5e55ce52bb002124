"""vLLM's own server with the plug-in and without: the order follows the objectives, the tokens are the same."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.vllm_alone import HEADERS, PLUG_IN, server
from tests.support import plain_http
from tests.support.stack import until
from tests.support.vllm_alone import Crowd

pytestmark = [pytest.mark.integration, pytest.mark.alone, pytest.mark.timeout(1800)]

TIERS = '[{"name": "soon", "ttft_ms": 60000, "tpot_ms": 5000}]'
SIZES = ("--max-num-seqs", "2", "--max-num-batched-tokens", "256", "--enable-server-load-tracking")
PAUSES = {"VLLM_SERVER_DEV_MODE": "1"}  # it has /pause and /resume then
BULK = [f"bulk{i}" for i in range(7)]


def crowd(url: str) -> Crowd:
    """Requests without an objective, then one that may wait and one that must not, all queued while vLLM is paused."""
    asked = Crowd(url)
    asked.send("first", "the first one compiles what is not compiled yet", 4, vllm_xargs={"slo_ttft_ms": 60000})
    asked.wait()
    plain_http.post(f"{url}/pause", params={"mode": "keep"}, timeout=60).raise_for_status()
    for place, name in enumerate(BULK, 1):
        asked.send(name, f"{name} " * 60, 100)
        until_taken(url, place)
    asked.send("patient", "may wait a little " * 20, 20, {"x-slo-ttft-ms": "500000", "x-slo-tpot-ms": "50000"})
    until_taken(url, len(BULK) + 1)
    asked.send("urgent", "a quick question " * 20, 20, vllm_xargs={"slo_tier": "soon"})
    until_taken(url, len(BULK) + 2)
    time.sleep(1.0)  # from the server to its engine
    plain_http.post(f"{url}/resume", timeout=60).raise_for_status()
    asked.wait()
    asked.close()
    return asked


def until_taken(url: str, requests: int) -> None:
    until(lambda: plain_http.get(f"{url}/load", timeout=60).json()["server_load"] == requests, 60)


def test_order_follows_objectives_and_tokens_are_the_same(tmp_path: Path) -> None:
    tiers = tmp_path / "tiers.yaml"
    tiers.write_text(TIERS)
    plugged = server(*SIZES, *PLUG_IN, *HEADERS, env={**PAUSES, "POLYSLO_TIERS": str(tiers)})
    with ExitStack() as kept:
        with ThreadPoolExecutor() as starts:
            stock_url, url = starts.map(kept.enter_context, [server(*SIZES, env=PAUSES), plugged])
        stock, ours = crowd(stock_url), crowd(url)
        wrong = plain_http.post(
            f"{url}/v1/completions", json={"prompt": "a", "vllm_xargs": {"slo_tier": "sun"}}, timeout=20
        )
    assert set(stock.ended[-4:]) >= {"patient", "urgent"}, f"vLLM serves by arrival: {stock.ended}"
    places = {name: ours.ended.index(name) for name in ours.ended}
    assert max(places["urgent"], places["patient"]) < min(places[name] for name in BULK[2:]), ours.ended
    bulk = [name for name in ours.ended if name in BULK]
    assert all(abs(bulk.index(name) - BULK.index(name)) <= 2 for name in BULK), f"not by arrival: {bulk}"
    assert ours.texts == stock.texts
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "vllm_xargs.slo_tier"
