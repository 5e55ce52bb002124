"""One modelled engine under the traffic of ``benchmarks.engine_slo``."""

from benchmarks.engine_slo_virtual import Engine, summarize
from benchmarks.engine_traffic import GPU_CLASSES, Job
from profiles.store import load_profile
from protocol.messages import Slo

TIGHT, _, SPARE = GPU_CLASSES
PROFILE = load_profile("h200_sxm__llama-3.1-8b")


def jobs(tpot_s: float) -> list[Job]:
    """A promise and best effort of 40 tokens each."""
    return [
        Job(TIGHT, Slo(0.05, tpot_s), 0.0, [1] * 500, 40),
        Job(SPARE, Slo(best_effort=True), 0.0, [1] * 3000, 40),
    ]


def test_a_run_is_judged_when_it_ends_or_is_ended() -> None:
    engine = Engine(PROFILE, 0.0, {})
    finished = summarize(jobs(0.024), engine.run("slo", jobs(0.024), 10.0, 0), 10.0)
    assert (finished["attained"], finished["attained tight"], finished["best_effort_tokens"]) == (1.0, 1.0, 40.0)
    assert finished["tokens_per_s"] == (500 + 3000 + 80) / 10.0
    cut = summarize(jobs(0.024), engine.run("slo", jobs(0.024), 0.1, 0), 0.1)
    assert cut["attained"] == 0.0
    assert 0 <= cut["best_effort_tokens"] < 40
    assert summarize(jobs(0.001), engine.run("slo", jobs(0.001), 10.0, 0), 10.0)["attained"] == 0.0


def test_options_are_those_of_slo_alone() -> None:
    engine = Engine(PROFILE, 0.0, {"max_iteration_s": 0.01})
    limits = [
        float(engine.run(each, jobs(0.1), 1.0, 0).engines.limits["max_iteration_s"][0]) for each in ("slo", "vllm")
    ]
    assert limits == [0.01, 0.2]
