"""What a modelled replica reports: its requests as of the last iteration that ended, nothing of the one that runs."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from controller.options import FleetOptions
from planning.deadlines import num_uncomputed_tokens
from protocol.messages import Report
from simulation.core.jobs import make_records, to_rows
from simulation.core.loop import Simulation
from simulation.core.progress import preempt
from simulation.dispatchers.live_fleet import ControllerDispatcher, tiers_of
from simulation.studies.systems import FleetOf, Straying
from tests.support.simulation_cases import STOCK, a100, jobs_at, random_jobs, run


@pytest.fixture(name="ahead")
def check_reports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Checks every report of a run; tokens that engines have made in their tables and do not tell yet."""
    ahead, tell = list[int](), ControllerDispatcher.reports

    def checked(self: ControllerDispatcher, simulation: Simulation) -> Sequence[Report]:
        told = tell(self, simulation)
        for r, report in enumerate(told):
            ahead.extend(check(simulation, r, report))
        return told

    monkeypatch.setattr(ControllerDispatcher, "reports", checked)
    return ahead


def check(simulation: Simulation, r: int, report: Report) -> Iterator[int]:
    """Every request that is there and no other, with no token, end or iteration before it came."""
    records, table, now_s = simulation.records, simulation.table(r), simulation.now_s
    made = dict(zip((table["id"] - 1).tolist(), table["emitted_tokens"].tolist(), strict=True))
    ends = np.flatnonzero(records["ended"] & (records["last_s"] > now_s) & (records["replica"] == r))
    assert {int(at.request_id) for at in report.requests} == {*made, *ends.tolist()}
    for at in report.requests:
        record = records[int(at.request_id)]
        assert not at.emitted_tokens or record["first_s"] <= now_s
        yield made.get(int(at.request_id), int(record["emitted_tokens"])) - at.emitted_tokens
    assert all(records["last_s"][int(name)] <= now_s for name, _tokens in report.finished)
    spans = zip(simulation.engines.begun.begin_s[r], simulation.engines.begun.end_s[r], strict=True)
    ages_s = [now_s - begin_s for begin_s, end_s in spans if begin_s <= now_s < end_s]
    assert [report.iteration_age_s] == (ages_s or [0.0])


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_reports_tell_nothing_of_what_has_not_ended(steps_in_flight: int, ahead: list[int]) -> None:
    straying = Straying(sigma=0.1, steps_in_flight=steps_in_flight)
    simulation = run(random_jobs(300, 25.0, 3), FleetOf("live", admits=True, replicas=2, straying=straying))
    assert simulation.records["ended"].all()
    assert set(ahead) == set(range(steps_in_flight + 1)), "tokens of iterations in flight are not told"


def test_so_do_engines_that_were_made_for_no_controller_and_whose_tables_grow(ahead: list[int]) -> None:
    jobs = jobs_at([0.001 * k for k in range(1200)], prompt=20, output=30)
    engines, slots = STOCK.engines(a100()), STOCK.engines(a100()).tables.shape[1]
    assert slots < len(jobs)
    simulation = Simulation(jobs, engines, ControllerDispatcher(a100(), tiers_of(jobs), FleetOptions(admission=False)))
    simulation.run()
    assert simulation.engines.begun.tables.shape[2] == simulation.engines.tables.shape[1] > slots
    assert set(ahead) == {0, 1}


def test_who_is_preempted_finds_its_cached_prefix_again() -> None:
    """What it found of its prompt is the prefix cache's; the rest is to be computed again."""
    engines, jobs = STOCK.engines(a100()), jobs_at([0.0], prompt=1000)
    row, record = to_rows(jobs, np.array([0]))[0], make_records(1)[0]
    row["computed_tokens"], row["emitted_tokens"], row["running"], record["cached_tokens"] = 1009, 10, True, 512
    preempt(engines.state[0], row, record)
    assert (row["computed_tokens"], row["running"], record["preemptions"]) == (512, False, 1)
    assert num_uncomputed_tokens(row) == 1010 - 512
