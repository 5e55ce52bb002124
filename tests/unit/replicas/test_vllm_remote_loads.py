"""Requests whose KV cache comes from elsewhere while others run."""

from collections.abc import Callable
from typing import Any

import pytest

from protocol.messages import Slo
from tests.support.background_loads import BackgroundLoads

LOOSE, BEST_EFFORT = Slo(ttft_s=60.0, tpot_s=1.0), Slo(best_effort=True)


@pytest.mark.parametrize("policy", ["slo", "vllm"])
def test_a_request_that_was_fetched_holds_up_nobody(make_bench: Callable[..., Any], policy: str) -> None:
    bench = make_bench(policy, max_num_seqs=8, max_num_batched_tokens=2048, enable_prefix_caching=False)
    scheduler = bench.scheduler
    scheduler.connector, scheduler._connector_finished = BackgroundLoads(), lambda _request: (False, None)
    bench.add("long", [3] * 3000, 20, LOOSE)
    bench.add("remote", [2] * 100, 4, BEST_EFFORT)
    for step in range(60):
        if step == 8:
            bench.add("later", [4] * 10, 3, LOOSE)
        scheduled = bench.begin()
        if step == 4:
            assert [request.request_id for request in scheduler.kv_holding_waiting] == ["remote"]
            scheduler.finished_recving_kv_req_ids.add("remote")
        bench.end(scheduled)
    assert not scheduler.has_unfinished_requests()
