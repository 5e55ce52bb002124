"""How the fleet is run: what the configuration tells the controller."""

import msgspec

from controller.disaggregation.phases import PhaseOptions
from controller.lengths.estimate import LengthOptions
from controller.programs.options import ProgramOptions
from controller.scaling.allocation import AllocationOptions
from protocol.messages import BLOCK_TOKENS

ON_HEAD = {"node:__internal_head__": 0.001}  # workers come and go: one that nothing but this is on would count as idle
OUTLIVING = {  # Ray's options of named actors that are made once and outlive deploys
    "lifetime": "detached",
    "get_if_exists": True,
    "num_cpus": 0,
    "resources": ON_HEAD,
    "max_restarts": -1,
    "max_concurrency": 1000,
}
DP, GREEDY, ARRIVAL = "dp", "greedy", "arrival"  # how the set is chosen that is promised (``FleetOptions.selection``)


class CheckpointOptions(msgspec.Struct, frozen=True):
    """Where the controller keeps what it has learnt; empty: nowhere."""

    uri: str = ""
    period_s: float = 30.0


class AdapterOptions(msgspec.Struct, frozen=True):
    """How many LoRA adapters a replica has room for: in one batch, and in its memory."""

    running: int = 1
    held: int = 1


class FleetOptions(msgspec.Struct, frozen=True):
    """How the fleet is run, from the configuration."""

    routing: str = "marginal_load"
    admission: bool = True  # off: the routing policy's first choice takes the request unchecked
    max_hops: int = 4  # replicas that a request may try before it waits, is served best effort or refused
    selection: str = DP  # of those not begun; or ``greedy``: most value per work first, or ``arrival``: who was first
    pending: bool = True  # what is not attainable now waits for room until it would be too late
    unattainable: str = "best_effort"  # or "refuse", where a tier does not say
    silent_s: float = 1.5  # a replica that has not reported for so long takes no new requests
    forget_s: float = 30.0
    length_prior_tokens: float = 256.0
    retry_cap_s: float = 30.0  # whole seconds that a refusal tells at most
    best_effort_backlog: float = 2.0  # requests without an objective that a replica holds, per sequence it may run
    seed: int = 0
    controller_shards: int = 1  # controllers that have the replicas between them (controller.shards)
    prefix_affinity: float = 0.0  # what a whole prompt in a prefix cache adds to the policy's preference; 0: off
    block_tokens: int = BLOCK_TOKENS  # of those caches
    adapters: AdapterOptions = AdapterOptions()
    phases: PhaseOptions | None = None  # prefill and decode on different replicas (controller.disaggregation.fleet)
    allocation: AllocationOptions = AllocationOptions()
    lengths: LengthOptions = LengthOptions()
    checkpoints: CheckpointOptions = CheckpointOptions()
    programs: ProgramOptions = ProgramOptions()
    deploy: str = ""  # id of the deploy: ingresses of an earlier one may still be heard (``controller.deploys``)
    application: str = ""  # Serve's name of it
    deployments: tuple[str, ...] = ()  # Serve's names of the replicas', the one that grows and shrinks first
    model: str = ""  # whose fleet it is, where the application has several

    @property
    def searches(self) -> bool:
        """Whether sets are searched for, by the DP where they are large."""
        return self.selection == DP
