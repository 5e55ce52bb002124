"""vLLM's own engine core over a timed device, one to three steps in flight, up to the controller's mirror."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from controller.fleet import Fleet
from profiles.kernels import iteration_s
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Report, Slo, Submission, Verdict
from tests.support.engine_driver import Driver, submission
from tests.support.fleet_cases import H200, fleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CAPACITY_TOKENS, DECODES = 8192, 24
SPEED = 0.125  # an iteration takes longer than a busy machine keeps a process waiting
PATIENT = Slo(ttft_s=60.0, tpot_s=5.0, tier="loose")


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda steps: f"{steps}_in_flight")
def engine(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """An H200 that is slow enough to be watched."""
    driver = Driver(
        device="timed",
        profile=H200,
        speed=SPEED,
        steps_in_flight=request.param,
        kv_capacity_tokens=CAPACITY_TOKENS,
        max_num_seqs=64,
    )
    yield driver
    driver.stop()


def report(driver: Driver) -> Report:
    """As the replica makes it."""
    state = driver.engine.state()
    return Report(
        "r", "1", 1, H200, state.kv_capacity_tokens, state.kv_used_tokens, state.max_running,
        iteration_age_s=state.iteration_age_s, requests=state.requests, **msgspec.structs.asdict(state.limits),
    )  # fmt: skip


@pytest.fixture(scope="module")
def drafting() -> Iterator[Driver]:
    """The same with speculation; seven of ten draft tokens are accepted."""
    driver = Driver(device="timed", profile=H200, speed=0.5, num_speculative_tokens=4)
    yield driver
    driver.stop()


def mirrored(driver: Driver) -> Fleet:
    told = fleet()
    told.report(report(driver), 0.0)
    return told


def test_newcomers_are_part_of_the_next_step_though_others_are_in_flight(engine: Driver) -> None:
    """A step is formed shortly before the one in flight is likely to end; formed at once, newcomers wait for two."""
    names = {f"e{i}" for i in range(DECODES)}
    engine.submit([submission(name, [ord(name[-1])] * 100, 120, PATIENT) for name in sorted(names)])
    engine.collect(names, until=lambda so_far: min(map(len, so_far.values())) >= 50)
    steps = []
    for i in range(15):
        begun, name = engine.engine.state().steps, f"n{i}"
        engine.submit([submission(name, [7 + i] * 40, 1, PATIENT)])
        engine.collect({name} | names, until=lambda so_far, name=name: bool(so_far[name]))  # type: ignore[misc]
        steps.append(engine.engine.state().steps - begun)
    engine.collect(names)
    limits, depth = engine.engine.state().limits, engine.engine._config.depth
    assert np.median(steps) <= (2 if depth < 3 else 4), "the one in flight, and its own"
    assert (limits.lead_s < 1.0) == (depth == 2), "nor is it held where vLLM forms three"
    assert limits.newcomer_share == (1 / 2 if depth < 3 else 1 / 3)


def test_the_lead_that_is_asked_for_is_that_of_the_engine(engine: Driver) -> None:
    """Engines that do not form late know no lead."""
    engine.runner.run(engine.engine.configure("slo", {"lead_s": 0.125}))
    engine.submit([submission("asked", [5] * 20, 20, PATIENT)])
    engine.collect({"asked"})
    assert engine.engine.state().limits.lead_s == (0.125 if engine.engine._config.depth == 2 else float("inf"))
    engine.runner.run(engine.engine.configure("slo", {}))


def test_running_decodes_are_seen_to_go_on_and_what_does_not_fit_is_refused(engine: Driver) -> None:
    """The decodes hold half of the cache now, and nearly all of it at their ends."""
    mirrored(engine)  # loads the controller's kernels, which takes as long as many iterations
    names = {f"d{i}" for i in range(DECODES)}
    engine.submit([submission(name, [ord(name[-1])] * 150, 150, PATIENT) for name in sorted(names)])
    engine.collect(names, until=lambda so_far: min(map(len, so_far.values())) >= 20)
    for _ in range(5):  # at moments that nothing chose
        engine.collect(names, until=lambda so_far: max(map(len, so_far.values())) >= 2)
        told = mirrored(engine)
        table = told.replicas["r"].table
        assert len(table) == DECODES
        left = table["prompt_tokens"] + table["emitted_tokens"] - table["computed_tokens"]
        assert (left == 1).all()
        assert table["running"].all()
        assert (table["emitted_tokens"] < table["output_tokens"]).all()
        assert told.replicas["r"].state["load"][0] > 0
    asked = [AdmissionRequest(f"a{i}", 2000, 400, PATIENT) for i in range(4)]
    assert [told.admit([each], 0.001)[0].verdict for each in asked] == [Verdict.REFUSED] * 4
    assert told.admit([AdmissionRequest("small", 20, 5, PATIENT)], 0.002)[0].verdict == Verdict.ADMITTED
    engine.collect(names)
    engine.settle(lambda: engine.engine.state().kv_used_tokens == 0)


def test_time_capacity_and_text_are_those_of_the_configuration(engine: Driver) -> None:
    from replicas.vllm_codec import decode_request, encode_request, with_emitted

    engine.engine.take_steps()
    whole = submission("whole", list(b"the quick brown fox"), 40, PATIENT)
    engine.submit([whole])
    tokens = engine.collect({"whole"})["whole"]
    assert bytes(tokens).isascii()
    assert engine.engine.state().kv_capacity_tokens == CAPACITY_TOKENS
    coefficients = load_profile(H200).coefficients / SPEED
    engine.settle(lambda: not engine.engine.state().busy)
    steps = engine.engine.take_steps()
    begun = next(place for place, step in enumerate(steps) if step.batch_tokens == 19)
    steps = steps[begun:]  # without what was in flight for those that ended before
    decodes = [step.kv_tokens for step in steps[1:]]
    assert decodes[:39] == list(range(20, 59))
    assert len(decodes) <= 39 + 1, "vLLM with three in flight may begin one step before it knows of the end"
    predicted = [iteration_s(coefficients, *msgspec.structs.astuple(step)[:5]) for step in steps]
    assert sum(step.seconds for step in steps) >= 0.95 * sum(predicted)
    payload = encode_request(with_emitted(decode_request(whole.payload), tokens[:15]))
    engine.submit([Submission("rest", 19, 15, 40, PATIENT, 1.0, 40, 0, payload)])
    assert engine.collect({"rest"})["rest"] == tokens[15:]


def test_what_needs_logits_is_refused(engine: Driver) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    bound = submission("bound", [5] * 10, 3, PATIENT, structured_outputs=StructuredOutputsParams(json={}))
    engine.submit([bound, submission("scored", [5] * 10, 3, PATIENT, logprobs=1)])

    async def read() -> list:
        return await engine.engine.next_outputs()

    refused = engine.runner.run(read())
    assert [(delta.request_id, delta.finish) for delta in refused] == [("bound", "error"), ("scored", "error")]
    assert all("timed device" in str(delta.stop_reason) for delta in refused)


def test_an_objective_that_needs_speculation_is_promised_once_its_gain_is_known(drafting: Driver) -> None:
    """Tokens are due faster than an iteration takes. What is learnt comes from streams that need no drafts."""
    alone_s = iteration_s(load_profile(H200).coefficients, 1.0, 500.0, 0.0, 1.0, 0.0)
    tight = AdmissionRequest("tight", 400, 1000, Slo(ttft_s=0.05, tpot_s=0.7 * alone_s))
    assert drafting.engine.state().limits.drafts == 0, "not told yet"
    assert mirrored(drafting).admit([tight], 0.001)[0].verdict == Verdict.BEST_EFFORT
    names = {f"s{i}" for i in range(24)}
    drafting.submit([submission(name, [ord(name[-1])] * 50, 700, PATIENT) for name in sorted(names)])
    drafting.collect(names)
    drafting.settle(lambda: drafting.engine.state().kv_used_tokens == 0)
    limits = drafting.engine.state().limits
    assert limits.drafts == 4
    assert 0.4 < limits.acceptance < 0.7, "what nine of ten streams reach is less than the mean"
    decision = mirrored(drafting).admit([tight], 0.001)[0]
    assert decision.verdict == Verdict.ADMITTED
    assert decision.predicted_tpot_s < tight.slo.tpot_s
