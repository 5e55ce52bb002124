"""The Serve application: replicas, and ingresses in front of them. ``import_path: serving.app:build`` in serve.yaml."""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import ray
from ray import serve

from protocol.garbage import no_collections
from replicas.config import EMBEDDED_MODEL, controller_name
from replicas.deployment import replica_deployment
from replicas.embedded import ensure_embedded_model
from serving.config.app import INGRESS, AppConfig
from serving.config.base import ConfigError
from serving.config.engine import LogLevel
from serving.config.limits import GuardConfig
from serving.config.parallel import misfit
from serving.dispatch.engine_request import Timeouts
from serving.dispatch.transport import RayTransport
from serving.ingress.guard import SETTINGS, middlewares

logger = logging.getLogger("polyslo.app")

ACCELERATOR = "accelerator_type:"  # beginning of Ray's name of what a kind of GPU adds to a node
ON_DEMAND = "set fleet.nodes_on_demand where its autoscaler adds nodes"
CPU_ONLY = {"VLLM_TARGET_DEVICE": "cpu", "TOKENIZERS_PARALLELISM": "false"}


@serve.ingress()
class Ingress:
    """One HTTP ingress; any number of them share the controller and the replicas."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: AppConfig, replicas: dict[str, dict[str, Any]], deploy: str
    ) -> None:
        """``replicas``: by the model's name, Serve's handle of each group; ``deploy``: another id for each deploy."""
        self.config, self.replicas, self.deploy = config, replicas, deploy
        self.ingress_app: Any = None

    async def __serve_build_asgi_app__(self) -> Any:
        with no_collections():
            from serving.ingress.models_app import ModelsApp

            apps = [await self._app_of(each) for each in self.config.each]
        self.ingress_app = ModelsApp(self.config, apps) if self.config.models else apps[0]
        return self._with_batches(self.ingress_app, apps)

    def _with_batches(self, app: Any, apps: Sequence[Any]) -> Any:
        """The application behind the Batch API; where that is on, this ingress serves lines of batches.

        ``apps``: those of its models.
        """
        from serving.batches.api import BatchApi
        from serving.batches.keeper import KeeperLink
        from serving.batches.runner import BatchRunner
        from serving.ingress.browsers import for_browsers
        from serving.ingress.guard import Guard

        context, wanted, link, first = serve.get_replica_context(), self.config.batches, None, apps[0]
        if wanted.storage:
            options = wanted.options(self.config.ingress.limits.body_bytes)
            worker, count = context.replica_id.unique_id, first.metrics.batch_request
            namespace = self.config.each[0].fleet.controller_namespace
            link = KeeperLink(options, context.app_name, self.deploy, worker, namespace)
            runner = BatchRunner(app, link, worker, wanted.in_flight, count)
            self.running = asyncio.get_running_loop().create_task(runner.run())
        has_tenants = any(each.has_tenants for each in apps)
        guard = self.config.guard
        api = BatchApi(app, link, lambda inner: first.for_browsers(Guard(inner, guard)), has_tenants)
        return for_browsers(api, guard.cors)  # where Serve's own proxy stands before it, nothing else is around the API

    async def _app_of(self, config: AppConfig) -> Any:
        """The application of one model: vLLM's server, and the way from it to the model's controller and replicas."""
        from serving.config.vllm_arguments import command_line
        from serving.ingress.ingress import Deploy, IngressApp
        from serving.ingress.vllm_server import make_server

        fleet, context = config.fleet, serve.get_replica_context()
        name = controller_name(fleet.controller_name, context.app_name)
        handles, ingress_id = self.replicas[config.entry], context.replica_id.unique_id
        transport = RayTransport(handles, ingress_id, name, fleet.controller_namespace)
        model = str(ensure_embedded_model()) if config.model.id == EMBEDDED_MODEL else config.model.id
        transit_s = config.ingress.transit_s
        timeouts = Timeouts(fleet.admit_timeout_s, fleet.resume_timeout_s, fleet.stall_timeout_s, transit_s)
        arguments, marked = command_line(model, config.server_arguments), config.marked_block_tokens
        limits = config.ingress.limits
        server, client = await make_server(arguments, transport, timeouts, marked, limits, config.not_computed)
        return IngressApp(
            config,
            transport,
            server,
            client.dispatcher,
            Deploy(context.app_name, self.deploy),
            engine_failed=lambda: bool(server.state.engine_client.errored),
        )

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
    check_cluster(config, ray.cluster_resources(), [node["Resources"] for node in ray.nodes() if node["Alive"]])
    check_arguments(config)
    ingress = config.ingress
    replicas = {each.entry: deployments_of(each) for each in config.each}
    deployment = serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=ingress.num_replicas,
        max_ongoing_requests=ingress.max_ongoing_requests,
        max_queued_requests=ingress.max_queued_requests,
        ray_actor_options={
            "num_cpus": ingress.num_cpus,
            "runtime_env": {"env_vars": CPU_ONLY | logged(most_talkative(config)) | guarded(config.guard)},
        },
        health_check_period_s=2,
        graceful_shutdown_timeout_s=ingress.drain_s,
        max_surge_percent=100,  # the new ones serve before the old ones drain, which keep their cores for so long
    )
    return deployment.bind(
        config, replicas, uuid.uuid4().hex
    )  # built anew only where args or code changed, not the tiers


def deployments_of(config: AppConfig) -> dict[str, Any]:
    """The bound deployments of one model's replicas, by the names of their groups."""
    return {
        group.name: replica_deployment(
            msgspec.to_builtins(config.replica_config(group)),
            name=group.deployment,
            num_replicas=group.num_processes,
            ray_actor_options=group.actor_options,
            **group.placement,
        )
        for group in config.replica_groups()
    }


def check_arguments(config: AppConfig) -> None:
    """Name what vLLM does not take, which would otherwise end every process; vLLM loads only where there is any."""
    if any(each.has_vllm_arguments for each in config.each):
        from serving.config.vllm_check import check

        check(config)


def most_talkative(config: AppConfig) -> str:
    """The level of the model whose engines log most: all have the same ingress."""
    levels: tuple[str, ...] = get_args(LogLevel)
    return min((each.engine.log_level for each in config.each), key=levels.index)


def logged(level: str) -> dict[str, str]:
    """Environment of an ingress whose vLLM logs at a level and above."""
    return {"VLLM_LOGGING_LEVEL": level, "VLLM_LOGGING_PREFIX": f"[{INGRESS}] "}


def guarded(config: GuardConfig) -> dict[str, str]:
    """Environment of a process in which Serve puts the guard around its own handler of HTTP requests."""
    callback = f"{middlewares.__module__}.{middlewares.__name__}"
    return {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": callback, SETTINGS: config.model_dump_json()}


def check_cluster(config: AppConfig, resources: dict[str, float], nodes: Sequence[dict[str, float]] = ()) -> None:
    """Say at once what would otherwise be a deployment that waits for ever. ``nodes``: what each one of them has."""
    if any(each.fleet.nodes_on_demand for each in config.each):
        return
    wanted = {"CPU": config.cores_needed, "GPU": config.gpus_needed}
    for group in config.replica_groups():
        for name, amount in group.reserved.items():
            if name not in ("CPU", "GPU") and not name.startswith(ACCELERATOR):
                wanted[name] = wanted.get(name, 0.0) + group.num_processes * amount
        if group.accelerator_type and not resources.get(f"{ACCELERATOR}{group.accelerator_type}"):
            lacks = f"needs accelerator_type {group.accelerator_type}; the cluster has none"
            raise ConfigError(f"groups: {group.name} {lacks}; {ON_DEMAND}")
    for name, amount in wanted.items():
        if amount > (has := resources.get(name, 0.0)):
            raise ConfigError(f"fleet: needs {amount:g} {name}; the cluster has {has:g}; {ON_DEMAND}")
    for group in config.replica_groups() if nodes else ():
        strategy = group.engine.placement_group_strategy
        if told := misfit(group.bundles or [group.reserved], strategy, nodes):
            raise ConfigError(f"{'groups: ' if group.name else ''}{group.deployment}: {told}; {ON_DEMAND}")
