"""One whole ingress with several models in this process: as ``ingress_scene``, with a fake fleet for each model."""

import asyncio

from replicas.embedded import ensure_embedded_model
from serving.config.vllm_arguments import command_line
from serving.dispatch.engine_request import Timeouts
from serving.ingress.ingress import IngressApp
from serving.ingress.models_app import ModelsApp
from serving.ingress.vllm_server import FleetCoreClient, make_server
from tests.support.ingress_scene import TABLE, Ingress, OneReplica


class Models(Ingress):
    """``transports`` and ``clients`` by the models' names; the rest is as of one model."""

    models_app: ModelsApp

    async def _build(self) -> None:
        self.transports = {each.entry: OneReplica() for each in self.config.each}
        self.clients: dict[str, FleetCoreClient] = {}
        apps = []
        for each in self.config.each:
            arguments = command_line(str(ensure_embedded_model()), each.server_arguments)
            transport = self.transports[each.entry]
            server, client = await make_server(arguments, transport, Timeouts())
            self.clients[each.entry] = client
            apps.append(IngressApp(each, transport, server, client.dispatcher))  # type: ignore[arg-type]
        self.ingress_app = self.models_app = ModelsApp(self.config, apps)  # type: ignore[assignment]
        self.models_app.set_table(TABLE)

    async def _close(self) -> None:
        for app in self.models_app.apps:
            app._pinging.cancel()
        await asyncio.gather(*(client.dispatcher.close() for client in self.clients.values()))
