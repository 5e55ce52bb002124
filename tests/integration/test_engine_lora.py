"""LoRA adapters in a real engine on a CPU: who gets which, how many run at a time, and what cannot be loaded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import Slo, Submission
from replicas.config import Adapter
from tests.support.adapters import write_adapter
from tests.support.engine_driver import BEST_EFFORT, Driver, submission

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NAMES = ("poet", "lawyer", "doctor")
SIZES: dict[str, Any] = dict(kv_cache_gib=0.05, max_num_seqs=8, max_num_batched_tokens=256, hang_s=120.0)
PROMPT = list(b"once upon a time there was a small model " * 4)
SOON, LATER = Slo(ttft_s=100.0, tpot_s=10.0), Slo(ttft_s=400.0, tpot_s=20.0)


def asking(name: str, adapter: str, slo: Slo = LATER, path: str = "/no/such/path", tokens: int = 16) -> Submission:
    """A request for an adapter under the number and the path that some ingress, or a client, made up."""
    import msgspec
    from vllm.lora.request import LoRARequest

    from replicas.vllm_codec import decode_request, encode_request

    plain = submission(name, PROMPT, tokens, slo)
    request = decode_request(plain.payload)
    request.lora_request = LoRARequest(adapter, 77, path) if adapter else None
    return msgspec.structs.replace(plain, payload=encode_request(request))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES, 1):
        write_adapter(folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Driver]:
    """Three adapters, of which one runs at a time."""
    driver = Driver(
        engine_kwargs={"enable_lora": True, "max_loras": 1, "max_cpu_loras": 3, "max_lora_rank": 8},
        lora_modules=tuple(Adapter(name, str(folder / name)) for name in NAMES),
        **SIZES,
    )
    yield driver
    driver.stop()


def test_each_adapter_answers_in_its_own_way_whatever_is_cached(engine: Driver) -> None:
    said: dict[str, list[list[int]]] = {name: [] for name in ("", *NAMES)}
    for turn in range(2):
        for name in said:
            engine.submit([asking(f"{turn}{name}", name)])
            said[name].append(engine.collect({f"{turn}{name}"})[f"{turn}{name}"])
    assert all(first == again for first, again in said.values())
    assert len({tuple(tokens[0]) for tokens in said.values()}) == 4


def test_more_adapters_than_run_together_wait_for_one_another(engine: Driver) -> None:
    """Running requests that a step leaves out count too: vLLM ends where two adapters come back at once."""
    alone = {}
    for name in NAMES:
        engine.submit([asking(f"alone {name}", name, tokens=30)])
        alone[name] = engine.collect({f"alone {name}"})[f"alone {name}"]
    batch = [
        asking(f"{i} {name}", name, (BEST_EFFORT, LATER, SOON)[(i + place) % 3], tokens=30)
        for i in range(4)
        for place, name in enumerate(NAMES)
    ]
    engine.submit(batch)
    tokens = engine.collect({each.request_id for each in batch})
    assert all(tokens[each.request_id] == alone[each.request_id.split()[1]] for each in batch)
    assert engine.engine.state().planner_failures == 0


def test_an_unknown_adapter_is_rejected_and_the_engine_lives(engine: Driver, folder: Path) -> None:
    engine.submit([asking("stranger", "painter", path=str(folder / "poet"))])
    (delta,) = engine.runner.run(engine.engine.next_outputs())
    assert (delta.finish, delta.stop_reason) == ("error", "lora_modules: this replica has no adapter 'painter'")
    engine.submit([asking("after", "poet")])
    assert len(engine.collect({"after"})["after"]) == 16


def test_an_adapter_that_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    with pytest.raises(ValueError, match="lora_modules: adapter 'broken' at "):
        Driver(
            engine_kwargs={"enable_lora": True, "max_lora_rank": 8},
            lora_modules=(Adapter("broken", str(tmp_path / "broken")),),
            **SIZES,
        )
