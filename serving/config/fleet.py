"""The configuration of a fleet and of its ingresses: the sections ``fleet`` and ``ingress`` of an application."""

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from profiles.suggest import suggest
from replicas.config import APPLICATION
from routing.policy import routing_names
from serving.config.autoscaling import AutoscalingConfig, Share
from serving.config.base import Section, Seed, defaults
from serving.config.engine import REPLICA, Name
from serving.config.limits import GuardConfig, LimitsConfig
from serving.request.tenant import tenant_by

CONTROLLER_NAME = f"polyslo-controller-{APPLICATION}"  # among several models followed by a slash and the model's name
ALLOCATION, FLEET = defaults(AllocationOptions), defaults(FleetOptions)

ErrorStatus = Annotated[int, Field(ge=400, le=599)]


class FleetConfig(Section):
    """The replicas and the controller that decides between them."""

    num_replicas: PositiveInt = 2
    routing: str = FLEET.routing
    admission: bool = FLEET.admission  # off: no request is checked, the routing policy's first choice takes it
    max_hops: PositiveInt = FLEET.max_hops  # replicas that a request may try
    selection: Literal["dp", "greedy", "arrival"] = FLEET.selection  # which of those that have not begun is promised
    pending: bool = FLEET.pending  # what is not attainable now waits for room until it would be too late
    unattainable: Literal["best_effort", "refuse"] = FLEET.unattainable  # where a tier does not say
    prefix_affinity: NonNegativeFloat = FLEET.prefix_affinity  # what a whole cached prompt adds to the score
    overload_status: ErrorStatus = 429  # some proxies retry on one code only
    best_effort_share: Share | None = None  # of the time, for best effort that is old; None: the scheduler's own
    best_effort_backlog: PositiveFloat = FLEET.best_effort_backlog  # that a replica holds, times its max_num_seqs
    length_prior_tokens: PositiveFloat = FLEET.length_prior_tokens  # expected output until finished requests have told
    report_interval_s: PositiveFloat = REPLICA.report_interval_s
    silent_s: PositiveFloat = FLEET.silent_s  # a replica without a report for so long takes no new requests
    stall_timeout_s: PositiveFloat = 10.0  # a stream whose engine stands still so long moves elsewhere
    admit_timeout_s: PositiveFloat = 2.0  # without an answer of the controller: by the last known loads
    start_timeout_s: PositiveFloat = REPLICA.start_timeout_s  # for a start until the first replica serves
    resume_timeout_s: PositiveFloat = 60.0  # a broken stream waits so long for a replica
    controller_name: Name = CONTROLLER_NAME
    controller_namespace: Name = "polyslo"
    controller_shards: PositiveInt = FLEET.controller_shards  # controllers that have the replicas between them
    seed: Seed = FLEET.seed
    nodes_on_demand: bool = False  # the cluster's autoscaler adds the nodes that are missing: wait for them
    roles: Literal["auto", "static", "dynamic"] = ALLOCATION.roles  # dynamic: replicas move between tiers and the pool
    role_idle_s: PositiveFloat = ALLOCATION.idle_s  # without a request of its tier for so long, a replica leaves it
    autoscaling: AutoscalingConfig = Field(default_factory=AutoscalingConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.routing not in routing_names():
            raise ValueError(f"routing: no policy {self.routing!r}; {suggest(self.routing, routing_names())}")
        if self.silent_s <= self.report_interval_s:
            raise ValueError(f"silent_s: must exceed report_interval_s ({self.report_interval_s}), got {self.silent_s}")
        if self.routing == "silos" and self.roles == "dynamic":
            raise ValueError("routing: replicas of silos do not move between tiers, so roles have to be static")
        if self.routing == "silos" and self.autoscaling.max_replicas:
            raise ValueError("routing: silos have a fixed size, because replicas that come would belong to no tier")
        return self


class IngressConfig(Section):
    """The HTTP ingresses; where they listen is Serve's own ``http_options``."""

    num_replicas: PositiveInt = 1
    num_cpus: NonNegativeFloat = 0.5  # CPU cores that each reserves in Ray
    max_ongoing_requests: PositiveInt = 1000
    max_queued_requests: NonNegativeInt = 1000  # that wait for one of those places; 503 beyond
    drain_s: NonNegativeFloat = 600.0  # that streams have to end once another ingress takes the place of theirs
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    transit_s: NonNegativeFloat = 0.005  # that a token takes from its iteration to the client; promises leave it that

    def guard(
        self, file_bytes: int, keys: Sequence[Sequence[str]] = ((),), cors: Mapping[str, Any] = MappingProxyType({})
    ) -> GuardConfig:
        """What an ingress's outermost layers keep to; files for batches may have so many bytes. ``keys``: API keys of
        each model. ``cors``: as ``ModelConfig.cors``."""
        return GuardConfig(
            **self.limits.model_dump(),
            most_requests=self.max_ongoing_requests + self.max_queued_requests,
            file_bytes=file_bytes,
            tenants=list(map(tenant_by, chain(*keys))),
            asks_environment=not all(keys),
            cors=dict(cors),
        )
