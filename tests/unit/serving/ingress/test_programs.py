"""A part of a program from its HTTP request to the verdict, in the whole ingress."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from protocol.messages import AdmissionRequest, Decision
from protocol.programs import INF, StageGiven
from serving.ingress.metrics import IngressMetrics
from tests.support.ingress_scene import MODEL, Ingress, admitted, refused

BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 6}
HEADERS = [("x-program-id", "task"), ("x-program-deadline-ms", "20000")]
NAMED = [("x-slo-tier", "standard")]
FIGURES = "ttft", "tpot", "e2e"


@pytest.fixture(scope="module")
def ingress() -> Iterator[Ingress]:
    with Ingress() as scene:
        yield scene


@pytest.fixture(autouse=True)
def _as_new(ingress: Ingress) -> None:
    ingress.reset()


def staged(ask: AdmissionRequest) -> Decision:
    """A controller that gives the second stage of three 4 s."""
    return msgspec.structs.replace(admitted(ask), stage=StageGiven(2, 4.0, 12.0, 3.0, 0.87654, True))


def program(**told: Any) -> dict[str, Any]:
    return {**BODY, "slo": {"program": told}}


def test_the_controller_is_told_of_the_program_and_the_client_of_its_stage(ingress: Ingress) -> None:
    ingress.transport.decide = staged
    answer = ingress.post("/v1/completions", program(stage="act", parents=["plan"], tools=["grep"]), HEADERS)
    (asked,) = ingress.transport.admissions
    assert asked.program
    assert (asked.program.id, asked.program.stage, asked.program.parents) == ("task", "act", ("plan",))
    assert (asked.program.tools, asked.program.model) == (("grep",), MODEL)
    assert (asked.slo.e2e_s, asked.slo.is_tier_open) == (20.0, True), "the program's deadline, until the stage's comes"
    assert answer.headers["x-slo-stage-deadline-ms"] == "4000"
    assert answer.json()["slo"]["program"] == {
        "id": "task", "stage": 2, "stages_expected": 3.0, "stage_deadline_ms": 4000.0, "left_ms": 12000.0,
        "similarity": 0.877, "promised": True,
    }  # fmt: skip


def test_engines_serve_by_the_deadline_of_the_stage(ingress: Ingress) -> None:
    ingress.transport.decide = staged
    ingress.post("/v1/completions", BODY, [("x-program-id", "other"), ("x-program-deadline-ms", "20000")])
    (submitted,) = ingress.transport.submitted
    assert submitted.slo.e2e_s == 4.0


def test_a_tighter_deadline_of_the_request_stands(ingress: Ingress) -> None:
    ingress.transport.decide = staged
    ingress.post("/v1/completions", BODY, [*HEADERS, ("x-slo-e2e-ms", "1500")])
    assert ingress.transport.submitted[0].slo.e2e_s == 1.5


def test_a_tier_named_keeps_its_figures_and_best_effort_has_no_deadline(ingress: Ingress) -> None:
    ingress.post("/v1/completions", BODY, [*HEADERS, ("x-slo-tier", "interactive")])
    ingress.post("/v1/completions", BODY, [*HEADERS, ("x-slo-tier", "batch")])
    first, second = (asked.slo for asked in ingress.transport.admissions)
    assert (first.tier, first.ttft_s, first.e2e_s) == ("interactive", 0.5, 20.0)
    assert (second.best_effort, second.e2e_s) == (True, INF)


def test_a_deadline_need_not_be_said_again(ingress: Ingress) -> None:
    """Later calls that did not say it had the figures of the default tier beside it."""
    for more in ([("x-program-deadline-ms", "20000")], [], [("x-slo-ttft-ms", "30000")], [("x-slo-tier", "batch")]):
        assert ingress.post("/v1/completions", BODY, [("x-program-id", "once"), *more]).status_code == 200
    first, second, third, last = (asked.slo for asked in ingress.transport.admissions)
    assert (first.ttft_s, first.e2e_s, first.is_tier_open) == (INF, 20.0, True)
    assert second == first
    assert (third.ttft_s, third.e2e_s) == (20.0, 20.0), "no contradiction: another ingress might not know"
    assert (last.best_effort, last.e2e_s) == (True, INF)


def test_a_deadline_that_only_the_controller_knows_takes_the_place_of_the_default_tiers_figures(
    ingress: Ingress,
) -> None:
    """Another ingress has heard of it."""
    ingress.transport.decide = staged
    answers = [ingress.post("/v1/completions", BODY, [("x-program-id", "elsewhere"), *more]) for more in ([], NAMED)]
    first, second = (asked.slo for asked in ingress.transport.admissions)
    assert (first.tier, first.ttft_s, first.is_default) == ("standard", 2.0, True)
    assert (second.ttft_s, second.is_default) == (2.0, False)
    told = [[answer.json()["slo"][f"target_{figure}_ms"] for figure in FIGURES] for answer in answers]
    assert told == [[None, None, 4000.0], [2000.0, 150.0, 4000.0]]
    served = [submitted.slo for submitted in ingress.transport.submitted]
    assert [(slo.ttft_s, slo.tpot_s, slo.e2e_s) for slo in served] == [(INF, INF, 4.0), (2.0, 0.15, 4.0)]


def test_a_program_without_a_deadline_has_the_default_tiers_figures(ingress: Ingress) -> None:
    given = StageGiven(1, INF, INF, 3.0, 0.0, True)
    ingress.transport.decide = lambda ask: msgspec.structs.replace(admitted(ask), stage=given)
    answer = ingress.post("/v1/completions", BODY, [("x-program-id", "lax")])
    assert [answer.json()["slo"][f"target_{figure}_ms"] for figure in FIGURES] == [2000.0, 150.0, None]
    assert ingress.transport.submitted[0].slo.ttft_s == 2.0


def test_later_requests_carry_age_and_promise(ingress: Ingress) -> None:
    ingress.transport.decide = staged
    headers = [("x-program-id", "aged"), ("x-program-deadline-ms", "20000")]
    for _ in range(2):
        ingress.post("/v1/completions", BODY, headers)
    first, second = (asked.program for asked in ingress.transport.admissions)
    assert first
    assert second
    assert (first.age_s, first.is_promised) == (0.0, False)
    assert second.age_s > 0.0
    assert second.is_promised


@pytest.mark.parametrize(
    ("what", "wrong", "headers"),
    [("malformed", {}, [("x-slo-tpot-ms", "fast")]), ("too long", {"prompt": "x " * 90_000}, [])],
)
def test_a_request_that_is_a_mistake_starts_no_programs_clock(
    ingress: Ingress, what: str, wrong: dict[str, Any], headers: list[tuple[str, str]]
) -> None:
    named = [("x-program-id", f"first {what}"), ("x-program-deadline-ms", "20000")]
    assert ingress.post("/v1/completions", BODY | wrong, [*named, *headers]).status_code == 400
    ingress.post("/v1/completions", BODY, named)
    (asked,) = ingress.transport.admissions
    assert asked.program
    assert asked.program.age_s == 0.0


def test_an_id_that_is_used_after_the_last_request_names_another_program(ingress: Ingress) -> None:
    ingress.transport.decide = staged
    named = [("x-program-id", "again"), ("x-program-deadline-ms", "20000")]
    for body in (BODY, program(last=True), BODY):
        ingress.post("/v1/completions", body, named)
    told = [asked.program for asked in ingress.transport.admissions if asked.program]
    assert [each.is_promised for each in told] == [False, True, False]
    assert told[2].age_s == 0.0


def test_a_refused_program_is_told_when_to_come_back(ingress: Ingress) -> None:
    ingress.transport.decide = lambda ask: msgspec.structs.replace(refused(ask), reason="program_unattainable")
    answer = ingress.post("/v1/completions", BODY, [("x-program-id", "never"), ("x-program-deadline-ms", "50")])
    assert answer.status_code == 429
    assert answer.headers["x-slo-reason"] == "program_unattainable"
    assert answer.headers["retry-after"] == "2"


def test_metrics_show_programs() -> None:
    metrics = IngressMetrics(MODEL)
    metrics.observe_status({"replicas": [], "programs": {"open": 2, "on_time": 7, "late": 1}})
    assert metrics.registry.get_sample_value("polyslo_programs", {"state": "on_time"}) == 7.0
    assert metrics.registry.get_sample_value("polyslo_programs", {"state": "kept"}) == 0.0


def test_the_example_agent_runs_on_the_openai_sdk(ingress: Ingress, capsys: pytest.CaptureFixture[str]) -> None:
    ingress.transport.decide = staged
    path = Path(__file__).resolve().parents[4] / "examples" / "agent.py"
    example = runpy.run_path(str(path))

    async def play() -> None:
        app = httpx.ASGITransport(ingress.ingress_app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=app) as http:
            client = openai.AsyncOpenAI(base_url="http://ingress/v1", api_key="none", max_retries=0, http_client=http)  # type: ignore[arg-type]
            await example["Agent"](client, MODEL, 10_000).run()

    ingress.run(play())
    told = [asked.program for asked in ingress.transport.admissions]
    assert [program.stage for program in told if program] == ["plan", "look", "look", "answer"]
    assert len({program.id for program in told if program}) == 1
    assert [program.is_last for program in told if program] == [False, False, False, True]
    assert capsys.readouterr().out.count("held") == 4
