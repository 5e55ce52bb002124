"""The application that is deployed, as Serve is told of it."""

import pytest
import ray

from serving.app import build

ARGS = {
    "model": "embedded",
    "profile": "h100_sxm__llama-3.1-8b",
    "engine": {"kind": "simulated", "num_cpus": 0.1},
    "ingress": {"drain_s": 77},
}


def test_an_ingress_that_is_replaced_has_time_to_end_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve ends it soon by itself, and before the new one serves."""
    resources = {"CPU": 8.0}
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": resources}])
    told = build(ARGS)._bound_deployment._deployment_config
    assert (told.graceful_shutdown_timeout_s, told.max_surge_percent) == (77.0, 100)
