"""Adapters in front of a fleet: vLLM's own server lists them, and a request says which one it wants."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from replicas.vllm_codec import decode_request
from serving.ingress.vllm_server import FleetCoreClient
from tests.support.adapters import write_adapter
from tests.support.ingress_scene import Ingress


@pytest.fixture(scope="module")
def ingress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingress]:
    poet = write_adapter(tmp_path_factory.mktemp("adapters") / "poet", 1)
    with Ingress(engine_kwargs={"enable_lora": True, "max_lora_rank": 8, "lora_modules": [f"poet={poet}"]}) as started:
        yield started


def test_base_and_adapters_are_listed(ingress: Ingress) -> None:
    cards = {card["id"]: card for card in ingress.run(ingress.ask("/v1/models", method="GET")).json()["data"]}
    assert set(cards) == {"embedded", "poet"}
    assert cards["poet"]["parent"] == "embedded"


def test_a_request_tells_controller_and_engine_its_adapter(ingress: Ingress) -> None:
    for model, adapter in (("poet", "poet"), ("embedded", "")):
        ingress.reset()
        answer = ingress.post("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        assert ingress.transport.admissions[0].adapter == adapter
        sent = decode_request(ingress.transport.submitted[0].payload).lora_request
        assert (sent.lora_name if sent else "") == adapter


def test_an_unknown_model_is_vllms_404(ingress: Ingress) -> None:
    answer = ingress.post("/v1/completions", {"model": "painter", "prompt": "a"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith("The model `painter` does not exist.")


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_loading_at_run_time_is_refused_with_a_word(ingress: Ingress, path: str) -> None:
    answer = ingress.post(path, {"lora_name": "painter", "lora_path": "/tmp/painter"})
    assert answer.status_code == 404
    assert "lora_modules" in answer.json()["error"]["message"]


def test_the_client_loads_only_what_the_command_line_named(ingress: Ingress) -> None:
    from vllm.lora.request import LoRARequest

    client: FleetCoreClient = ingress.client
    assert ingress.run(client.add_lora_async(LoRARequest("poet", 1, "path")))
    with pytest.raises(ValueError, match="lora_modules"):
        ingress.run(client.add_lora_async(LoRARequest("painter", 2, "path")))
