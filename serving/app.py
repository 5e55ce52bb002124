"""The Serve application: replicas, and ingresses in front of them. ``import_path: serving.app:build`` in serve.yaml."""

import logging
import uuid
from typing import Any

import msgspec
import ray
from ray import serve

from replicas.config import EMBEDDED_MODEL, controller_name
from replicas.deployment import replica_deployment
from replicas.embedded import ensure_embedded_model
from serving.config.app import INGRESS, AppConfig
from serving.config.base import ConfigError
from serving.config.limits import GuardConfig
from serving.dispatch.engine_request import Timeouts
from serving.dispatch.transport import RayTransport
from serving.ingress.guard import SETTINGS, middlewares

logger = logging.getLogger("polyslo.app")

ON_DEMAND = "set fleet.nodes_on_demand where its autoscaler adds nodes"
CPU_ONLY = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}


@serve.ingress()
class Ingress:
    """One HTTP ingress; any number of them share the controller and the replicas."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: AppConfig, replicas: dict[str, Any], deploy: str
    ) -> None:
        """``replicas``: Serve's handle of each group; ``deploy``: another id for each deploy."""
        self.config, self.deploy = config, deploy
        fleet = config.fleet
        context = serve.get_replica_context()
        self.application = context.app_name
        name = controller_name(fleet.controller_name, self.application)
        self.transport = RayTransport(replicas, context.replica_id.unique_id, name, fleet.controller_namespace)
        self.ingress_app: Any = None

    async def __serve_build_asgi_app__(self) -> Any:
        from serving.config.vllm_arguments import command_line
        from serving.ingress.ingress import Deploy, IngressApp
        from serving.ingress.vllm_server import make_server

        config, fleet = self.config, self.config.fleet
        model = str(ensure_embedded_model()) if config.model.id == EMBEDDED_MODEL else config.model.id
        transit_s = config.ingress.transit_s
        timeouts = Timeouts(fleet.admit_timeout_s, fleet.resume_timeout_s, fleet.stall_timeout_s, transit_s)
        arguments, marked = command_line(model, config.model.server_arguments), config.marked_block_tokens
        most = config.ingress.limits.prompt_logprobs
        server, client = await make_server(arguments, self.transport, timeouts, marked, most, config.not_computed)
        self.ingress_app = IngressApp(
            config,
            self.transport,
            server,
            client.dispatcher,
            Deploy(self.application, self.deploy),
            engine_failed=lambda: bool(server.state.engine_client.errored),
        )
        return self.ingress_app

    async def check_health(self) -> None:
        """Serve's question: raises where this ingress can serve nothing any more; Serve then makes a new one."""
        self.ingress_app.check()

    async def reconfigure(self, user_config: Any) -> None:
        """Serve's in-place update, and its first configuration: the tier table, taken on to the controller."""
        self.ingress_app.set_table(user_config)
        await self.ingress_app.forward_table()


def build(args: dict[str, Any]) -> serve.Application:
    """The application from the ``args`` of serve.yaml.

    Raises:
        ConfigError: naming every wrong field, and what the cluster lacks for the fleet.
    """
    config = AppConfig.read(args)
    check_cluster(config, ray.cluster_resources())
    check_engine_kwargs(config)
    ingress = config.ingress
    replicas = {
        group.name: replica_deployment(
            msgspec.to_builtins(config.replica_config(group)),
            name=group.deployment,
            num_replicas=group.num_replicas,
            ray_actor_options=group.actor_options,
        )
        for group in config.replica_groups()
    }
    deployment = serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=ingress.num_replicas,
        max_ongoing_requests=ingress.max_ongoing_requests,
        max_queued_requests=ingress.max_queued_requests,
        ray_actor_options={
            "num_cpus": ingress.num_cpus,
            "runtime_env": {"env_vars": CPU_ONLY | guarded(ingress.guard)},
        },
        health_check_period_s=2,
    )
    return deployment.bind(
        config, replicas, uuid.uuid4().hex
    )  # built anew only where args or code changed, not the tiers


def check_engine_kwargs(config: AppConfig) -> None:
    """Name an argument that vLLM does not have, which would otherwise end every replica; vLLM loads only for that."""
    for position, group in enumerate(config.replica_groups()):
        if group.engine.kind != "vllm" or not group.engine.engine_kwargs:
            continue
        from replicas.vllm_settings import check_arguments

        own = bool(config.groups) and "engine_kwargs" in config.groups[position].engine
        try:
            check_arguments(group.engine.engine_kwargs)
        except ValueError as error:
            raise ConfigError(f"{f'groups.{position}.' if own else ''}engine.{error}") from None


def guarded(config: GuardConfig) -> dict[str, str]:
    """Environment of a process in which Serve puts the guard around its own handler of HTTP requests."""
    callback = f"{middlewares.__module__}.{middlewares.__name__}"
    return {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": callback, SETTINGS: config.model_dump_json()}


def check_cluster(config: AppConfig, resources: dict[str, float]) -> None:
    """Say at once what would otherwise be a deployment that waits for ever."""
    if config.fleet.nodes_on_demand:
        return
    wanted = {"CPU": config.cores_needed, "GPU": config.gpus_needed}
    for group in config.replica_groups():
        for name, amount in (group.resources or {}).items():
            wanted[name] = wanted.get(name, 0.0) + group.num_replicas * amount
        if group.accelerator_type and not resources.get(f"accelerator_type:{group.accelerator_type}"):
            lacks = f"needs accelerator_type {group.accelerator_type}; the cluster has none"
            raise ConfigError(f"groups: {group.name} {lacks}; {ON_DEMAND}")
    for name, amount in wanted.items():
        if amount > (has := resources.get(name, 0.0)):
            raise ConfigError(f"fleet: needs {amount:g} {name}; the cluster has {has:g}; {ON_DEMAND}")
