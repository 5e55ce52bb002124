"""When an engine that keeps a step in flight forms the next one."""

import math
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planning.lead import EARLY_ERRORS, LAUNCH_S, formed_ahead_s
from planning.limits import make_limits
from profiles.kernels import iteration_s
from profiles.online_state import ERROR
from profiles.store import load_profile
from replicas.failures import Failures
from replicas.late_forming import LateForming
from replicas.step_clock import StepClock
from replicas.step_planner import StepPlanner, options_of, planner_limits

COEFFICIENTS = load_profile("h200_sxm__llama-3.1-8b").coefficients
MIX = np.array([64.0, 64_000.0, 0.0, 64.0, 0.0])
STEP_S = float(iteration_s(COEFFICIENTS, *MIX))


def planner(error: float = 0.08) -> StepPlanner:
    sizes = dict(kv_capacity_tokens=100_000, block_tokens=16, max_running=64, max_batch_tokens=2048)
    own = StepPlanner(COEFFICIENTS, **sizes)  # type: ignore[arg-type]
    own._correction[ERROR] = error
    return own


class Engine:
    """vLLM's loop with up to two steps in flight, over a device; clock readings are counted."""

    def __init__(
        self, own: StepPlanner, launch_s: float, unseen_s: float = 0.0, read_s: float = 0.0, update_s: float = 0.0
    ) -> None:
        self.clock, self.planner, self.launch_s, self.unseen_s = StepClock(), own, launch_s, unseen_s
        self.read_s, self.update_s = read_s, update_s  # from when an output is there until it is read, and followed
        self.forming = LateForming(self.clock, own, unseen_s)
        self.now_s, self.launched_s, self.free_s, self.idle_s = 0.0, -math.inf, 0.0, 0.0
        self.ends: list[float] = []  # of steps in flight
        self.waits: list[float] = []  # from when a step is formed until the one before it has ended

    def step(self, seconds: float) -> None:
        """Form one of ``seconds``, when it is time, and wait for the one before it."""
        at_s = self.forming.form_at_s(self.now_s, self.launched_s)
        self.now_s = max(self.now_s, at_s)
        self.clock.begin(self.now_s, MIX, self.planner.predict(MIX))
        self.waits += [end_s - self.now_s for end_s in self.ends]
        self.launched_s = self.now_s = self.now_s + self.launch_s
        begin_s = max(self.free_s, self.launched_s + self.unseen_s)
        self.idle_s += begin_s - self.free_s
        self.free_s = begin_s + seconds
        self.ends.append(self.free_s)
        if len(self.ends) == 2:
            self.now_s = max(self.now_s, self.ends.pop(0)) + self.read_s
            self.clock.returned_s = self.now_s
            self.now_s += self.update_s
            self.planner.observe(*self.clock.finish(self.clock.returned_s, is_continuing=True))


def test_the_next_step_is_formed_shortly_before_the_one_in_flight_is_likely_to_end() -> None:
    clock = StepClock()
    forming = LateForming(clock, planner(error=0.08))
    assert forming.form_at_s(10.0, -math.inf) == 10.0, "nothing is in flight"
    clock.begin(10.0, MIX, 0.05)
    assert forming.form_at_s(10.001, 10.001) == pytest.approx(10.05 - LAUNCH_S - EARLY_ERRORS * 0.08 * 0.05)
    assert forming.form_at_s(10.06, 10.001) == 10.06, "it is overdue"
    clock.begin(10.06, MIX, 100.0)
    assert forming.form_at_s(10.07, 10.001) == pytest.approx(10.07 + 0.2), "no plan takes longer"


def test_what_the_engine_keeps_to_is_what_forecasts_are_told() -> None:
    clock, own = StepClock(), planner(error=0.08)
    forming = LateForming(clock, own)
    clock.begin(10.0, MIX, 0.05)
    at_s = forming.form_at_s(10.001, 10.001)
    lead_s, share = own.lead
    told = make_limits(1000, steps_in_flight=2, lead_s=lead_s, lead_share=share)
    assert 10.05 - at_s == pytest.approx(formed_ahead_s(told, 0.05))


@pytest.mark.parametrize(("launch_s", "unseen_s"), [(5e-4, 0.0), (2e-3, 0.0), (1e-3, 2e-3)])
@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.25])
def test_few_steps_end_before_the_next_one_is_with_the_device(sigma: float, launch_s: float, unseen_s: float) -> None:
    """And hardly any of the device's time is lost, though the next step is formed far later than vLLM would."""
    engine, random = Engine(planner(), launch_s, unseen_s), np.random.default_rng(1)
    for _ in range(6000):
        engine.step(STEP_S * math.exp(random.normal(-(sigma**2) / 2, sigma)))
    assert engine.idle_s < 0.005 * engine.now_s
    waits = np.array(engine.waits[1000:])
    assert (waits < launch_s).mean() < 0.04
    assert np.median(waits) < launch_s + unseen_s + 2e-3 + 3.5 * sigma * STEP_S


@pytest.mark.parametrize(("read_s", "update_s"), [(0.0, 2e-3), (2.5e-4, 1e-3), (6e-4, 4e-3), (9e-4, 0.0)])
@pytest.mark.parametrize("sigma", [0.0, 0.005, 0.1])
def test_what_the_engines_process_does_between_steps_is_no_reason_to_wait(
    sigma: float, read_s: float, update_s: float
) -> None:
    """A step that is formed too late looks longer than it was, and the next one must not be formed later for it."""
    engine, random = Engine(planner(), 1.5e-3, read_s=read_s, update_s=update_s), np.random.default_rng(1)
    for _ in range(3000):
        engine.step(STEP_S * math.exp(random.normal(-(sigma**2) / 2, sigma)))
    assert engine.idle_s < 0.01 * engine.now_s
    assert engine.planner.predict(MIX) == pytest.approx(STEP_S, rel=0.12)


def test_an_engine_far_faster_than_its_profile_is_not_held_back_for_good() -> None:
    """A step that ended long ago looks as long as it was held: what is measured then must lead back to the truth."""
    engine = Engine(planner(), launch_s=1e-3)
    for _ in range(400):
        engine.step(0.4 * STEP_S)
    begun_s = engine.now_s
    for _ in range(100):
        engine.step(0.4 * STEP_S)
    assert engine.now_s - begun_s < 100 * 0.4 * STEP_S * 1.05


def test_options_and_vllms_own_scheduler_have_the_last_word() -> None:
    clock, own = StepClock(), planner()
    forming = LateForming(clock, own)
    clock.begin(10.0, MIX, 0.05)
    own.configure("slo", {"lead_s": 0.02})
    assert forming.form_at_s(10.001, 10.001) == pytest.approx(10.03)
    own.configure("slo", {})
    assert own.lead == (math.inf, 0.0), "an option that is gone is not what was learnt"
    own.configure("vllm", {})
    assert forming.form_at_s(10.001, 10.001) == 10.001
    assert own.lead == (math.inf, 0.0)
    own.configure("slo", {})
    assert forming.form_at_s(10.001, 10.001) > 10.03


def test_steps_are_formed_at_once_where_nobody_could_learn_how_late_is_soon_enough() -> None:
    clock, own = StepClock(), planner()
    forming = LateForming(clock, own)
    clock.begin(10.0, MIX, 0.05)
    assert forming.form_at_s(10.001, 10.001) > 10.001
    assert forming.form_at_s(10.001, -math.inf) == 10.001, "the executor tells nothing of launches"
    clock.returned_s = 10.0005
    assert forming.form_at_s(10.001, 10.001) == 10.001, "sampled when the step before had ended: structured output"
    clock.returned_s = 9.9
    own.learn_speed()
    assert forming.form_at_s(10.001, 10.001) == 10.001, "the profile is a guess"


def test_what_was_learnt_outlives_another_policy() -> None:
    own = planner()
    own.set_lead(0.004, 0.25)
    own.configure("edf", {"max_iteration_s": 0.1})
    assert own.lead == (0.004, 0.25)


def test_newcomers_wait_for_one_iteration_only() -> None:
    assert "newcomer_share" not in options_of({}, is_asynchronous=True, forms_late=True)
    assert planner_limits("slo", {"lead_s": 0.01}, kv_capacity_tokens=1)["lead_s"] == 0.01
    with pytest.raises(ValueError, match="lead_s must be positive"):
        planner_limits("slo", {"lead_s": 0.0}, kv_capacity_tokens=1)


class Core:
    """As much of vLLM's EngineCoreProc as waits for requests."""

    def __init__(self, hold_s: float | None, fails: bool = False) -> None:
        self.runs = True
        self.input_queue: queue.Queue = queue.Queue()
        self.aborts_queue: queue.Queue = queue.Queue()
        self.taken: list[Any] = []
        self.model_executor = SimpleNamespace()
        forming = None
        if hold_s is not None:
            forming = SimpleNamespace(form_at_s=lambda now_s, launched_s: now_s + (hold_s / (not fails)))
        self.scheduler = SimpleNamespace(polyslo_forming=forming, _failures=Failures())

    def has_work(self) -> bool:
        return True

    def is_running(self) -> bool:
        return self.runs

    def _handle_client_request(self, *request: Any) -> None:
        self.taken.append(request)
        self.runs = request != ("stop",)


@pytest.mark.parametrize("hold_s", [None, 0.3])
def test_requests_that_come_until_then_are_part_of_the_next_step(hold_s: float | None) -> None:
    from replicas.vllm_core import EngineCoreProc

    core, begun_s = Core(hold_s), time.monotonic()
    core.input_queue.put(("add", "before"))
    late = threading.Timer(0.1, core.input_queue.put, [("add", "meanwhile")])
    late.start()
    EngineCoreProc._process_input_queue(core)
    held_s = time.monotonic() - begun_s
    assert core.taken == ([("add", "before")] if hold_s is None else [("add", "before"), ("add", "meanwhile")])
    assert (held_s >= 0.3) == (hold_s is not None)
    late.join()


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_not_held_beyond_the_end_of_the_engine_nor_by_a_fault_of_ours(fails: bool) -> None:
    from replicas.vllm_core import EngineCoreProc

    core, begun_s = Core(30.0, fails), time.monotonic()
    late = threading.Timer(0.05, core.input_queue.put, [("stop",)])
    late.start()
    EngineCoreProc._process_input_queue(core)
    late.join()
    assert time.monotonic() - begun_s < 10.0
    assert core.scheduler._failures.count == fails


@pytest.mark.parametrize(
    ("settings", "is_late"),
    [({}, True), ({"async_scheduling": False}, False), ({"pipeline_parallel_size": 2}, False),
     ({"data_parallel_size": 2}, False), ({"max_concurrent_batches": 3}, False), ({"forms_late": False}, False)],
)  # fmt: skip
def test_only_engines_whose_next_step_nothing_else_waits_for_form_it_late(settings: dict, is_late: bool) -> None:
    from replicas.request_rows import KEY
    from replicas.vllm_core import forms_late, late_forming, own_options

    own = {"async_scheduling": True, "pipeline_parallel_size": 1, "data_parallel_size": 1, "world_size": 1} | settings
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(**own), parallel_config=SimpleNamespace(**own))
    config.max_concurrent_batches = own.get("max_concurrent_batches", 2)
    config.additional_config = {KEY: {"forms_late": own.get("forms_late", True)}}
    assert forms_late(config) == is_late
    assert (late_forming(config, StepClock(), planner()) is not None) == is_late
    assert ("lead_s" in own_options(config)({"lead_s": 0.01})) == is_late, "nor are forecasts told that they do"
    config.additional_config = None  # of a plug-in in vLLM's own server, whose executor tells no launches
    assert not forms_late(config)
