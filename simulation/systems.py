"""Serving systems to compare: a batch policy with its settings, and who admits."""

from dataclasses import dataclass, replace

import numpy as np

from planning.admission import AdmissionOptions
from planning.limits import make_limits
from profiles.profile import Profile
from simulation.dispatch import PlannedReplica, Routed
from simulation.engine import Engines, make_engines
from simulation.forms import policy_code
from simulation.loop import Dispatcher

MAX_ITERATION_S = 0.2


@dataclass(frozen=True)
class System:
    """One way to run one replica; ``admits`` puts the planner's soft admission control in front."""

    name: str
    policy: str = "slo"
    admits: bool = False
    sheds: bool = False
    token_budget: int = 8192
    max_running: int = 256
    spec_tokens: int = 0
    acceptance: float = 0.0
    draft_s: float = 0.0  # time of one draft step (k_spec of the profile where it has none)
    is_oracle: bool = False
    displace: bool = True
    best_effort_share: float = 0.0

    def with_budget(self, tokens: int) -> "System":
        return replace(self, token_budget=tokens)

    def engines(self, profile: Profile, replicas: int = 1, seed: int = 0) -> Engines:
        """Empty engines of this system on a profile's hardware."""
        engines = make_engines(replicas, 512, seed)
        coefficients = np.array(profile.coefficients)
        if self.draft_s > 0.0:
            coefficients[-1] = self.draft_s
        engines.coefs[:] = engines.believed[:] = coefficients
        engines.limits[:] = make_limits(
            kv_capacity_tokens=profile.kv_capacity_tokens,
            max_running=self.max_running,
            max_batch_tokens=self.token_budget,
            max_iteration_s=MAX_ITERATION_S,
            best_effort_share=self.best_effort_share,
            acceptance=self.acceptance,
        )
        engines.state["policy"], engines.state["sheds"] = policy_code(self.policy), self.sheds
        return engines

    def dispatcher(self, seed: int = 0) -> Dispatcher:
        """Who decides for one replica."""
        if self.admits:
            return PlannedReplica(AdmissionOptions(displace=self.displace), self.is_oracle)
        return Routed("round_robin", seed)


PLANNER = System("planner", admits=True)
BASELINES = (
    System("vllm-2048", "vllm", token_budget=2048),
    System("vllm-whole", "vllm-whole", token_budget=16384),
    System("sarathi", "sarathi"),
    System("sarathi-shed", "sarathi-shed", sheds=True),
    System("edf", "edf", token_budget=2048),
    System("edf-shed", "edf-shed", sheds=True),
    System("sjf", "sjf", token_budget=2048),
)
