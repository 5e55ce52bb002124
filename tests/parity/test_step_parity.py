"""One table of requests through the plug-in's translation and through the modelled engine: equal step plans."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from planning.batch.kv import PREEMPT
from planning.batch.registry import form, policy_code
from planning.engine import EngineModel
from protocol.messages import Slo, request_uid
from replicas.request_rows import RequestRows, to_extra_args
from replicas.step_planner import StepPlanner
from simulation.core.loop import Simulation
from simulation.studies.systems import PLANNER
from tests.support.simulation_cases import a100, random_jobs


class EngineRequest:
    """Told apart by identity, as vLLM's requests are."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def engine_request(row: np.void, asked: np.void) -> Any:
    """A request as vLLM's scheduler holds it, in the state of the modelled engine's row."""
    best_effort = bool(row["best_effort"])
    slo = Slo(float(asked["ttft_s"]), float(asked["tpot_s"]), float(asked["e2e_s"]), best_effort=best_effort)
    emitted = int(row["emitted_tokens"])
    return EngineRequest(
        request_id=str(int(row["id"])),
        sampling_params=SimpleNamespace(
            extra_args=to_extra_args(slo, float(row["arrival_s"]), int(row["output_tokens"]), 0)
        ),
        max_tokens=int(row["output_cap_tokens"]),
        num_prompt_tokens=int(row["prompt_tokens"]),
        num_computed_tokens=int(row["computed_tokens"]),
        num_output_placeholders=0,
        _output_token_ids=[7] * emitted,
        spec_token_ids=[],
    )


def test_plug_in_and_modelled_engine_plan_the_same_step() -> None:
    jobs = random_jobs(120, 60.0, 11)
    simulation = Simulation(jobs, PLANNER.engines(a100()), PLANNER.dispatcher(a100(), jobs))
    compared = []

    def watch(running: Simulation) -> bool:
        compared.append(_same_step(running))
        return len(compared) >= 60

    simulation.run(watch)
    assert len(compared) == 60
    assert sum(compared) > 1000


def _same_step(simulation: Simulation) -> int:
    """Compare one step; returns how many requests there were."""
    table, now_s = simulation.table(0).copy(), simulation.free_at_s(0)
    rows, limits = RequestRows(), simulation.engines.limits[0]
    requests = [engine_request(row, simulation.jobs[row["id"] - 1]) for row in table]
    for request in requests:
        rows.add(request, now_s)
    running = [request for request, row in zip(requests, table, strict=True) if row["running"]]
    waiting = [request for request, row in zip(requests, table, strict=True) if not row["running"]]
    planner = StepPlanner(
        simulation.engines.planner_coefs[0],
        kv_capacity_tokens=int(limits["kv_capacity_tokens"]),
        block_tokens=int(limits["block_tokens"]),
        max_running=int(limits["max_running"]),
        max_batch_tokens=int(limits["max_batch_tokens"]),
        learn=False,
    )
    planner.limits = limits
    live, seconds, _mix = planner.plan(rows.gather(running, waiting, drafts=False), now_s)
    modelled = np.zeros(len(table), dtype=np.int32)
    model = EngineModel(simulation.engines.planner_coefs[0], limits)
    expected_s, _ = form(policy_code("slo"), model, table, now_s, modelled)
    assert seconds == expected_s
    uids = {request_uid(request.request_id): int(row["id"]) for request, row in zip(requests, table, strict=True)}
    by_id = {int(row["id"]): int(tokens) for row, tokens in zip(table, modelled, strict=True)}
    assert len(uids) == len(table)
    ordered = [*running, *waiting]
    assert {int(r.request_id): int(t) for r, t in zip(ordered, live, strict=True)} == by_id
    assert min(by_id.values(), default=0) >= PREEMPT
    return len(table)
