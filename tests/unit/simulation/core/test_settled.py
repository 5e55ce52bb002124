"""What a modelled replica reports: its requests as of the last iteration that ended, nothing of the one that runs."""

from collections.abc import Sequence

import numpy as np
import pytest

from planning.deadlines import num_uncomputed_tokens
from protocol.messages import Report
from simulation.core.jobs import make_records, to_rows
from simulation.core.loop import Simulation
from simulation.core.progress import preempt
from simulation.dispatchers.live_fleet import ControllerDispatcher
from simulation.studies.systems import FleetOf, Straying
from tests.support.simulation_cases import STOCK, a100, jobs_at, random_jobs, run


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_reports_tell_nothing_of_what_has_not_ended(steps_in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is told before it was made, no end before it came, and no iteration before it is over."""
    seen = []
    tell = ControllerDispatcher.reports

    def checked(self: ControllerDispatcher, simulation: Simulation) -> Sequence[Report]:
        told = tell(self, simulation)
        for r, report in enumerate(told):
            table, now_s = simulation.table(r), simulation.now_s
            ahead = dict(zip((table["id"] - 1).tolist(), table["emitted_tokens"].tolist(), strict=True))
            for at in report.requests:
                job = int(at.request_id)
                record = simulation.records[job]
                assert not at.emitted_tokens or record["first_s"] <= now_s
                assert not record["ended"] or record["last_s"] > now_s
                seen.append(ahead.get(job, int(record["emitted_tokens"])) - at.emitted_tokens)
            for name, _tokens in report.finished:
                assert simulation.records["last_s"][int(name)] <= now_s
            here = {int(at.request_id) for at in report.requests}
            running = simulation.records["ended"] & (simulation.records["last_s"] > now_s)
            assert set(np.flatnonzero(running & (simulation.records["replica"] == r)).tolist()) <= here
            assert set(ahead) <= here
            spans = zip(simulation.engines.begun.begin_s[r], simulation.engines.begun.end_s[r], strict=True)
            ages_s = [now_s - begin_s for begin_s, end_s in spans if begin_s <= now_s < end_s]
            assert [report.iteration_age_s] == (ages_s or [0.0])
        return told

    monkeypatch.setattr(ControllerDispatcher, "reports", checked)
    straying = Straying(sigma=0.1, steps_in_flight=steps_in_flight)
    simulation = run(random_jobs(300, 25.0, 3), FleetOf("live", admits=True, replicas=2, straying=straying))
    assert simulation.records["ended"].all()
    assert set(seen) == set(range(steps_in_flight + 1)), "tokens of iterations in flight are not told"


def test_who_is_preempted_finds_its_cached_prefix_again() -> None:
    """What it found of its prompt is the prefix cache's; the rest is to be computed again."""
    engines, jobs = STOCK.engines(a100()), jobs_at([0.0], prompt=1000)
    row, record = to_rows(jobs, np.array([0]))[0], make_records(1)[0]
    row["computed_tokens"], row["emitted_tokens"], row["running"], record["cached_tokens"] = 1009, 10, True, 512
    preempt(engines.state[0], row, record)
    assert (row["computed_tokens"], row["running"], record["preemptions"]) == (512, False, 1)
    assert num_uncomputed_tokens(row) == 1010 - 512
