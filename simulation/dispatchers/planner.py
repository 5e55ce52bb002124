"""Who decides where jobs go: the planner on one replica.

Every decision is made by planning, routing or controller code; this module hands it the state and carries it out.
"""

import math
from dataclasses import dataclass

import numpy as np

from planning.admission.plan import AdmissionOptions, AdmissionPlan, plan_admission
from planning.engine import EngineModel
from planning.tables import to_best_effort
from simulation.core.loop import Simulation


class StatelessDispatcher:
    """What dispatchers that keep no state of their own have in common."""

    hears_ends = False

    def on_ended(self, simulation: Simulation, which: np.ndarray) -> None:
        """Nothing to learn from it."""

    def next_wake_s(self) -> float:
        return math.inf


@dataclass
class AdmissionDispatcher(StatelessDispatcher):
    """One replica under soft admission control (SLOs-Serve section 3.1): what is refused is served best effort.

    With ``reconsiders``, a refused request whose first token is not due yet is asked about again with every arrival:
    what was promised to others may have turned out cheaper than predicted.
    """

    options: AdmissionOptions
    reconsiders: bool = False
    drops_refused: bool = False

    def dispatch(self, simulation: Simulation, which: np.ndarray) -> None:
        rows = self._rows(simulation, which)
        asking = np.flatnonzero(~rows["best_effort"])
        if len(asking):
            table, again = simulation.table(0), self._again(simulation)
            asked = np.concatenate((self._rows(simulation, table["id"][again] - 1), rows[asking]))
            asked[: len(again)]["computed_tokens"] = table["computed_tokens"][again]
            asked[: len(again)]["running"] = table["running"][again]
            plan = self._plan(simulation, np.delete(table, again), asked)
            accepted = plan.accepted[len(again) :]
            refused = rows[asking[~accepted]]
            to_best_effort(refused)
            rows[asking[~accepted]] = refused
            if self.drops_refused:
                for row in refused:
                    simulation.refuse(int(row["id"]) - 1)
                rows = np.delete(rows, asking[~accepted])
            self._displace(simulation, np.delete(np.arange(len(table)), again)[plan.displaced])
            self._restore(simulation, again[plan.accepted[: len(again)]])
        for row in rows:
            simulation.place(row, 0)

    def _rows(self, simulation: Simulation, which: np.ndarray) -> np.ndarray:
        """Rows of the jobs ``which``; the rounds of a program that has missed are worth best effort only."""
        rows = simulation.rows(which)
        hopeless = rows[simulation.has_missed(which)]
        to_best_effort(hopeless)
        rows[simulation.has_missed(which)] = hopeless
        return rows

    def _plan(self, simulation: Simulation, table: np.ndarray, asked: np.ndarray) -> AdmissionPlan:
        planner_coefs, limits = simulation.engines.planner_coefs[0], simulation.engines.limits[0]
        return plan_admission(EngineModel(planner_coefs, limits), table, asked, simulation.free_at_s(0), self.options)

    def _again(self, simulation: Simulation) -> np.ndarray:
        """Places of refused requests that may still make it."""
        table = simulation.table(0)
        if not self.reconsiders:
            return np.zeros(0, dtype=np.int64)
        asked = simulation.jobs[table["id"] - 1]
        due_s = asked["arrival_s"] + asked["ttft_s"]
        may = table["best_effort"] & ~asked["best_effort"] & (table["emitted_tokens"] == 0)
        return np.flatnonzero(may & (due_s > simulation.free_at_s(0)))

    def _restore(self, simulation: Simulation, places: np.ndarray) -> None:
        """Give refused requests their objectives back."""
        if len(places):
            table = simulation.table(0)
            won = table[places]
            fresh = simulation.rows(won["id"] - 1)
            for name in ("best_effort", "ttft_s", "tpot_s", "deadline_s"):
                won[name] = fresh[name]
            table[places] = won
            simulation.records["missed"][won["id"] - 1], simulation.records["promised"][won["id"] - 1] = False, True

    def _displace(self, simulation: Simulation, places: np.ndarray) -> None:
        """Promises taken back in favour of a better set."""
        if len(places):
            lost = simulation.table(0)[places]
            to_best_effort(lost)
            simulation.table(0)[places] = lost
            records = simulation.records
            records["missed"][lost["id"] - 1], records["promised"][lost["id"] - 1] = True, False
