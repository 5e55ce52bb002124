"""The device that only keeps time: when batches are done, and what they emit."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiles.kernels import iteration_s
from profiles.store import load_profile, save_profile
from protocol.messages import Slo
from replicas.config import ReplicaConfig
from replicas.timed_device import Share, TimedDevice, TimedSettings, composition
from tests.support.planted_profile import SPREAD

H200 = "h200_sxm__llama-3.1-8b"
COEFFICIENTS = load_profile(H200).coefficients.tolist()


def device(**options: Any) -> TimedDevice:
    return TimedDevice(TimedSettings(COEFFICIENTS, 1000, **options), np.random.default_rng(1))


DECODE = Share("d", 1, 99, 100)
CHUNK = Share("p", 64, 32, 200)
VERIFY = Share("v", 4, 49, 50, drafts=3)


def test_a_batch_is_what_the_model_calls_it() -> None:
    assert composition([DECODE, CHUNK, VERIFY]) == (69.0, 100.0 + 53.0, 64 * (96 - 32), 3.0, 3.0)
    assert [share.emits for share in (DECODE, CHUNK, VERIFY)] == [True, False, True]
    assert Share("p", 168, 32, 200).emits


def test_batches_follow_each_other_as_the_profile_says() -> None:
    one_s = iteration_s(np.array(COEFFICIENTS), *composition([DECODE]))
    timed = device()
    assert timed.run_s([DECODE], 10.0) == pytest.approx(10.0 + one_s)
    assert timed.run_s([DECODE], 10.0) == pytest.approx(10.0 + 2 * one_s), "in flight: behind the first"
    assert timed.run_s([DECODE], 20.0) == pytest.approx(20.0 + one_s)


def test_stages_work_on_different_batches_and_a_stream_waits_for_its_own_token() -> None:
    one_s = iteration_s(np.array(COEFFICIENTS), *composition([DECODE]))
    timed, other = device(stages=2), Share("e", 1, 99, 100)
    assert timed.run_s([DECODE], 10.0) == pytest.approx(10.0 + one_s)
    assert timed.run_s([other], 10.0) == pytest.approx(10.0 + 1.5 * one_s)
    assert timed.run_s([DECODE], 10.0) == pytest.approx(10.0 + 2 * one_s)
    timed.end_stream("d")
    alone = device(stages=2)
    assert [alone.run_s([DECODE], 10.0) for _ in range(3)] == pytest.approx([10.0 + n * one_s for n in (1, 2, 3)])


def test_spread_keeps_the_mean() -> None:
    one_s = iteration_s(np.array(COEFFICIENTS), *composition([DECODE]))
    timed = device(spread=0.3)
    taken = np.array([timed.run_s([DECODE], 1e6 * i) - 1e6 * i for i in range(1, 2000)]) / one_s
    assert np.mean(taken) == pytest.approx(1.0, abs=0.03)
    assert np.std(np.log(taken)) == pytest.approx(0.3, abs=0.03)


def test_a_stream_goes_on_anywhere_with_the_same_tokens() -> None:
    here, there = device(), device()
    here.begin_stream("a", [1, 2, 3], 0)
    said = [here.emit(Share("a", 1, 2 + i, 3 + i))[0] for i in range(10)]
    there.begin_stream("b", [1, 2, 3, *said[:6]], 6)
    there.resume_stream("b", 0)
    assert [there.emit(Share("b", 1, 8 + i, 9 + i))[0] for i in range(4)] == said[6:]
    there.resume_stream("b", 1)
    assert there.emit(Share("b", 1, 9, 10)) == said[7:8]
    assert bytes(said).decode().isprintable()
    here.begin_stream("c", [1, 2, 4], 0)
    assert here.text("c", 0, 10) != said


def test_drafts_are_accepted_as_often_as_configured() -> None:
    timed = device(acceptance=0.6)
    timed.begin_stream("v", [1] * 49, 0)
    counts = np.bincount([len(timed.emit(VERIFY)) - 1 for _ in range(4000)], minlength=4) / 4000
    assert counts[0] == pytest.approx(0.4, abs=0.03)
    assert counts[3] == pytest.approx(0.6**3, abs=0.03)
    made = timed.text("v", 0, 1)
    assert timed.propose("v", 3) != made
    assert len(timed.propose("v", 3)) == 3


def test_results_come_when_they_are_due() -> None:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    from replicas.timed_executor import DueResult

    due_s = time.monotonic() + 0.05
    result = DueResult(EMPTY_MODEL_RUNNER_OUTPUT, due_s)
    assert not result.done()
    assert result.result() is EMPTY_MODEL_RUNNER_OUTPUT
    assert time.monotonic() >= due_s
    assert result.done()


def durations(timed: TimedDevice, share: Share, count: int) -> np.ndarray:
    """Of batches one after the other, in the profile's times."""
    exact_s = float(iteration_s(np.array(COEFFICIENTS), *composition([share])))
    return np.diff([timed.run_s([share], 0.0) for _ in range(count + 1)]) / exact_s


def test_a_device_strays_by_the_spread_of_its_profile_each_kind_of_batch_by_its_own() -> None:
    timed = device(strays=SPREAD.logs().tolist())
    for share, sigma in ((DECODE, 0.05), (CHUNK, 0.2)):
        logs = np.log(durations(timed, share, 3000))
        assert np.quantile(logs, 0.95) == pytest.approx(1.645 * sigma, rel=0.1)
        assert np.quantile(logs, 0.5) == pytest.approx(0.0, abs=0.1 * sigma)
    again, other = (device(strays=SPREAD.logs().tolist()) for _ in range(2))
    np.testing.assert_array_equal(durations(again, DECODE, 20), durations(other, DECODE, 20))


def test_a_stated_sigma_stands_in_for_the_spread_of_the_profile_and_zero_is_exact(tmp_path: Path) -> None:
    save_profile(replace(load_profile(H200), spread=SPREAD), path := tmp_path / "spread.json")
    config = ReplicaConfig(device="timed", profile=str(path))
    np.testing.assert_allclose(config.strays(load_profile(path)), SPREAD.logs())
    for sigma in (0.0, 0.1):
        stated = ReplicaConfig(device="timed", profile=str(path), iteration_spread=sigma)
        assert stated.strays(load_profile(path)) == []
    assert ReplicaConfig(device="timed", profile=H200).strays(load_profile(H200)) == []
    np.testing.assert_allclose(durations(device(), DECODE, 20), 1.0)


def test_the_device_in_the_engine_s_process_is_told_how_it_strays(tmp_path: Path) -> None:
    from replicas.request_rows import KEY
    from replicas.vllm_settings import engine_config

    save_profile(replace(load_profile(H200), spread=SPREAD), path := tmp_path / "spread.json")
    told = {
        sigma: engine_config(
            ReplicaConfig(device="timed", profile=str(path), iteration_spread=sigma), ""
        ).additional_config[KEY]["timed"]
        for sigma in (None, 0.0, 0.1)
    }
    assert [(each["spread"], bool(each["strays"])) for each in told.values()] == [(0, True), (0, False), (0.1, False)]


def timed_part(kind: str, config: Any) -> Any:
    """What runs vLLM's batches in an engine of one device, or as the first rank of several."""
    from replicas.timed_executor import TimedExecutor
    from replicas.timed_worker import TimedWorker

    if kind == "worker":
        return TimedWorker(vllm_config=config, local_rank=0, rank=0, distributed_init_method="")
    made = TimedExecutor.__new__(TimedExecutor)
    made.vllm_config = config
    made._init_executor()
    return made


@pytest.mark.parametrize("kind", ["executor", "worker"])
def test_a_request_whose_end_comes_with_an_empty_step_is_forgotten(make_bench: Callable[..., Any], kind: str) -> None:
    bench = make_bench(device="timed", max_num_batched_tokens=512)
    part = timed_part(kind, bench.scheduler.vllm_config)
    for i in range(3):
        bench.add(f"r{i}", [1] * 20, 2, Slo(ttft_s=5.0, tpot_s=0.1))
        while bench.scheduler.has_requests():
            scheduled = bench.begin()
            part.execute_model(scheduled)
            bench.end(scheduled)
    assert bench.batches[-1] == {}
    batches = part._batches
    assert [len(kept) for kept in (batches._prompts, batches._device._streams, batches._device._out_s)] == [0, 0, 0]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_vllm_keeps_as_many_steps_in_flight_as_it_is_told(steps: int) -> None:
    """The CPU platform turns asynchronous scheduling off when a configuration is made."""
    import pickle

    from replicas.vllm_settings import engine_config

    made = engine_config(ReplicaConfig(device="timed", profile=H200, steps_in_flight=steps), "")
    made = pickle.loads(pickle.dumps(made))  # it travels to the engine's process
    assert made.max_concurrent_batches == steps
    assert made.scheduler_config.async_scheduling == (steps > 1)
    assert ReplicaConfig(device="timed", profile=H200, engine_kwargs={"async_scheduling": False}).depth == 1
    assert ReplicaConfig(device="timed", profile=H200, num_speculative_tokens=2).depth == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"profile": ""}, "profile: a timed device needs"),
        ({"engine": "simulated"}, "device: timed is a device of the vllm engine"),
        ({"device": "abacus"}, "device: 'abacus' is not one of auto, timed"),
        ({"steps_in_flight": 0}, "steps_in_flight: must be 1 to 3"),
        ({"draft_acceptance": 1.5}, "draft_acceptance: must be 0 to 1"),
        ({"iteration_spread": -1.0}, "iteration_spread: must not be negative"),
        ({"kv_connector": "files"}, "kv_connector: a timed device"),
    ],
)
def test_impossible_devices_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplicaConfig(**{"device": "timed", "profile": H200} | settings)
