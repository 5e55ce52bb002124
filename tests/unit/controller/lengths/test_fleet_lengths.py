"""Every estimator behind one surface: answers at once, batches later, and what finished requests tell."""

from dataclasses import replace

import numpy as np
import pytest

from controller.lengths.estimate import LengthOptions, LengthQuery
from controller.lengths.estimators import ESTIMATORS
from controller.lengths.fleet_lengths import BATCH, FOREST, STALE, FleetLengths
from controller.lengths.training import grow_from
from protocol.messages import AdmissionRequest, Outcome, Progress, Slo, Traits, Verdict

PRIOR, CAP = 256.0, 4000


def lengths(estimator: str, **options: object) -> FleetLengths:
    return FleetLengths(LengthOptions(estimator=estimator, **options), PRIOR, {})  # type: ignore[arg-type]


def asked(name: str, app: str = "", tenant: str = "", hint: int = 0, cap: int = CAP) -> AdmissionRequest:
    traits = Traits(app=app, output_hint_tokens=hint)
    return AdmissionRequest(name, 100, cap, Slo(tier="gold"), tenant=tenant, traits=traits)


def ended(request: AdmissionRequest, tokens: int, finish: str = "stop") -> Outcome:
    figures = (0.1, 0.01, 1.0, 0.1, 0.01)
    told = (request.slo.tier, request.slo.tier, finish, True, *figures, tokens, Verdict.ADMITTED)
    return Outcome(request.request_id, *told, output_cap_tokens=request.max_tokens, tenant=request.tenant)


def seen(request: AdmissionRequest, emitted: int, told: tuple[float, float]) -> Progress:
    of = request.prompt_tokens, request.prompt_tokens + emitted - 1, emitted, int(told[0]), request.max_tokens
    return Progress(request.request_id, request.slo, 1.0, *of, True, int(told[1]))


def serve(state: FleetLengths, requests: int, seed: int = 0, tenant: str = "") -> None:
    """Requests of two applications, whose outputs differ tenfold, one after the other."""
    rng = np.random.default_rng(seed)
    for position in range(requests):
        app, median = ("short", 30.0) if position % 2 else ("long", 300.0)
        request, tokens = asked(f"{seed}-{position}", app, tenant), max(1, round(median * rng.lognormal(0.0, 0.3)))
        told = state.at_arrival(request)
        state.refresh()
        for emitted in range(50, tokens, 50):
            told = state.at_progress(seen(request, emitted, told))
            state.refresh()
        state.learn(ended(request, tokens))
        if known := state.training_set():
            state.set_forest(grow_from(known, state.next_version, 0))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_answer_lies_between_what_was_emitted_and_the_cap(estimator: str) -> None:
    state = lengths(estimator)
    serve(state, 80)
    for cap, emitted in ((1, 0), (40, 0), (40, 39), (CAP, 0), (CAP, 700), (10**7, 5000)):
        request = asked(f"x{cap}-{emitted}", "long", hint=120, cap=cap)
        told = [state.at_arrival(request)]
        told += [state.at_progress(seen(request, emitted, told[0]))] if emitted else []
        for _ in range(2):
            assert emitted < told[-1].mean_tokens <= told[-1].bound_tokens <= max(cap, emitted + 1)
            state.refresh()
            told.append(state.at_progress(seen(request, emitted, told[-1])) if emitted else state.at_arrival(request))
        state.learn(ended(request, max(1, emitted), "abort"))
    assert not state.live


def test_a_forest_tells_applications_apart_and_covers_as_promised() -> None:
    state = lengths("forest", train_every=150)
    serve(state, 400)
    assert state.forest is not None
    assert state.forest.version > 1
    state.coverage.answers.clear()
    serve(state, 300, seed=1)
    told = {}
    for app in ("short", "long"):
        state.at_arrival(request := asked(app, app))
        state.refresh()
        told[app] = state.at_arrival(request)
    assert 20 < told["short"].mean_tokens < told["short"].bound_tokens < 90
    assert 200 < told["long"].mean_tokens < told["long"].bound_tokens < 900
    arrival = state.coverage.summary()["arrival"]
    assert arrival["coverage"] == pytest.approx(0.9, abs=0.05)
    assert arrival["width_vs_max_tokens"] < 0.25


def test_admission_gets_the_answer_of_a_request_like_it_until_its_own_has_come() -> None:
    state = lengths("forest")
    serve(state, 100)
    state.at_arrival(first := asked("first", "long"))
    state.refresh()
    state.at_arrival(second := asked("second", "long"))
    assert [state.live[r.request_id].answers[-1].source for r in (first, second)] == [FOREST, STALE]
    assert state.refresh() == 1
    assert state.live["second"].answers[-1].source == FOREST


def test_a_batch_is_bounded_and_the_rest_keeps_its_answers() -> None:
    state = lengths("forest")
    serve(state, 100)
    for position in range(BATCH + 10):
        state.at_arrival(asked(f"many-{position}", "short"))
    assert (state.refresh(), state.refresh(), state.refresh()) == (BATCH, 10, 0)


def test_the_bound_of_a_long_output_grows_while_it_generates() -> None:
    state = lengths("forest")
    serve(state, 200)
    told = [state.at_arrival(request := asked("odd", "short"))]
    state.refresh()
    for emitted in (50, 100, 500):
        state.at_progress(seen(request, emitted, told[-1]))
        state.refresh()
        told.append(state.at_progress(seen(request, emitted, told[-1])))
    bounds = [each.bound_tokens for each in told]
    assert bounds[0] < bounds[-1] / 2
    assert all(bound > emitted for bound, emitted in zip(bounds, (0, 50, 100, 500), strict=True))


def test_hints_count_as_far_as_their_client_has_been_right() -> None:
    state = lengths("client_hint")
    for position in range(40):
        state.at_arrival(request := asked(f"h{position}", tenant="liar", hint=1000))
        state.learn(ended(request, 50))
    assert state.at_arrival(asked("next", tenant="liar", hint=1000)).mean_tokens < 120
    assert state.at_arrival(asked("honest", tenant="other", hint=1000)).mean_tokens == 1000


def test_without_an_estimator_the_cap_is_all_that_is_known() -> None:
    state = lengths("none")
    serve(state, 60)
    assert state.at_arrival(asked("x", "short")) == (CAP, CAP)


def test_a_cold_start_knows_the_prior_and_the_cap() -> None:
    cold = lengths("forest").at_arrival(asked("x"))
    assert cold.mean_tokens == PRIOR
    assert PRIOR < cold.bound_tokens <= CAP


def test_one_tenant_of_odd_lengths_leaves_the_bounds_of_others() -> None:
    state = lengths("forest", window=800)
    serve(state, 300)
    for position in range(400):
        state.at_arrival(request := asked(f"m{position}", "long", "mallory", cap=CAP))
        state.learn(ended(request, CAP, "length"))
    known = state.training_set()
    assert known is not None
    assert (known.output_tokens == CAP).sum() <= 200
    state.set_forest(grow_from(known, state.next_version, 0))
    serve(state, 60, seed=3, tenant="honest")
    state.at_arrival(request := asked("y", "long", "honest"))
    state.refresh()
    assert state.at_arrival(request).bound_tokens < CAP / 2


def test_an_earlier_forest_does_not_replace_a_later_one() -> None:
    state = lengths("forest")
    serve(state, 100)
    assert state.forest is not None
    earlier = state.forest
    state.set_forest(replace(earlier, version=7))
    state.set_forest(earlier)
    assert state.forest.version == 7


def test_a_controller_that_was_away_keeps_what_requests_were_told() -> None:
    state = lengths("forest")
    assert state.at_progress(seen(asked("old"), 40, (90, 120))) == (90, 120)
    mean, bound = state.at_progress(seen(asked("old"), 95, (90, 120)))
    assert 95 < mean <= bound


def test_which_kinds_are_forgotten_first_does_not_depend_on_the_hash_seed() -> None:
    state = lengths(FOREST)
    for program in [f"program {k}" for k in range(24)]:
        state._by_kind.clear()
        state._remember(LengthQuery("t", "", 10, 100, Traits(program=program)), (1.0, 2.0))
        assert [kind[3] for kind in state._by_kind] == [program, ""]
