"""Which replica the fleet chooses: by the routing policy's name, and as a set where a burst does not fit."""

import itertools
from collections import Counter

import numpy as np

from controller.fleet import Fleet
from controller.mirror.replica_model import admission_row
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from controller.status import fleet_status
from planning.admission.plan import REASONS, AdmitReason
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Report, Slo, Verdict
from routing.placement import check_replica

H200 = "h200_sxm__llama-3.1-8b"
TIGHT, LOOSE, FLEX = Slo(0.3, 0.03, tier="tight"), Slo(3.0, 0.1, tier="loose"), Slo(tier="flex", best_effort=True)
counter = itertools.count()


def fleet(names: str, replicas: int = 0, **options: object) -> Fleet:
    """Replicas a, b, ...; with ``replicas`` so many belong to each tier, the tightest first."""
    tiers = TierTable.of(
        1,
        [
            Tier("tight", 0.3, 0.03, num_replicas=replicas),
            Tier("loose", 3.0, 0.1, num_replicas=replicas),
            Tier("flex", best_effort=True),
        ],
    )
    chosen = FleetOptions(length_prior_tokens=100.0, pending=False, **options)  # type: ignore[arg-type]
    state = Fleet(chosen, tiers, load_profile)
    for name in names:
        state.report(Report(name, "1", 1, H200, 400_000, 0, 256, 8192, 0.0), 0.0)
    return state


def ask(slo: Slo, prompt_tokens: int = 500, **more: object) -> AdmissionRequest:
    return AdmissionRequest(f"r{next(counter)}", prompt_tokens, 200, slo, **more)  # type: ignore[arg-type]


def test_silos_promote_nobody() -> None:
    """More than the loose replica can promise: the default goes on to the tight one, a silo does not."""
    asked = [ask(LOOSE, 8000) for _ in range(40)]
    used = {}
    for routing in ("marginal_load", "silos"):
        decisions = fleet("ab", replicas=1, routing=routing).admit(asked, 0.0)
        used[routing] = {d.replica for d in decisions if d.verdict == Verdict.ADMITTED}
        assert any(d.verdict == Verdict.BEST_EFFORT for d in decisions), "there is more than both can promise"
    assert used == {"marginal_load": {"a", "b"}, "silos": {"b"}}


def test_best_effort_fills_silos() -> None:
    state = fleet("ab", replicas=1, routing="silos")
    assert {d.replica for d in state.admit([ask(FLEX), ask(FLEX)], 0.0)} == {"a", "b"}


def test_a_burst_that_does_not_fit_gets_the_best_set_and_not_the_shortest_prompts() -> None:
    """The shortest prompt comes with a pace that leaves no iteration long enough for any of the others."""
    greedy_one = ask(Slo(0.05, 0.0065, tier="tight"), 400)
    others = [ask(Slo(0.5, 0.03, tier="tight"), 5500) for _ in range(3)]
    greedy = fleet("a")
    verdicts = [greedy.admit([asked], 0.0)[0].verdict for asked in (greedy_one, *others)]
    assert verdicts == [Verdict.ADMITTED, *[Verdict.BEST_EFFORT] * 3]
    alone = fleet("a")
    alone.admit([greedy_one], 0.0)
    row = admission_row(others[0], 0, alone.lengths, 0.0)
    reason = REASONS[check_replica(alone.slots.fleet_state, 0, np.atleast_1d(row)[0], 0.0)]
    assert reason != AdmitReason.ADMITTED, "nor would an exact check of each have promised it"
    together = fleet("a")
    decisions = together.admit([greedy_one, *others], 0.0)
    assert [d.verdict for d in decisions] == [Verdict.BEST_EFFORT, *[Verdict.ADMITTED] * 3]
    assert all(d.predicted_ttft_s <= 0.5 and d.predicted_tpot_s <= 0.03 for d in decisions[1:])
    together.check_integrity()


PROMPT = tuple(range(1, 9))  # marks of eight blocks of 32 tokens


def test_affinity_prefers_the_replica_that_knows_the_prompt() -> None:
    """The load gradient would go to the most loaded one, the least added load to the other."""
    cases = (("load_gradient", 0.0, "a"), ("load_gradient", 1.0, "b"), ("marginal_load", 0.0, "b"))
    for routing, affinity, chosen in cases:
        state = fleet("ab", prefix_affinity=affinity, routing=routing)
        state.admit([ask(TIGHT, 300, prefix=PROMPT, exclude=("a",))], 0.0)
        state.admit([ask(TIGHT, 300, exclude=("b",)) for _ in range(3)], 0.0)
        (decision,) = state.admit([ask(TIGHT, 300, prefix=(*PROMPT, 99))], 0.0)
        assert (decision.replica, decision.verdict) == (chosen, Verdict.ADMITTED)
        if affinity:
            counted = {"prompt_tokens": 1500, "hit_tokens": 256, "certain_tokens": 0}
            assert fleet_status(state, 0.0)["prefixes"] == counted


def test_affinity_never_costs_a_promise_nor_counts_in_one() -> None:
    """The replica that knows it is full: the request goes where it fits, predicted as if nothing were cached."""
    known = ask(TIGHT, 4000, prefix=PROMPT)
    states = [fleet("ab", prefix_affinity=affinity) for affinity in (0.0, 5.0)]
    outcomes = []
    for state in states:
        state.admit([ask(TIGHT, 4000, prefix=PROMPT, exclude=("b",))], 0.0)
        fillers = state.admit([ask(TIGHT, 4000, exclude=("b",)) for _ in range(8)], 0.0)
        assert any(d.verdict == Verdict.BEST_EFFORT for d in fillers), "a is full"
        outcomes.append(state.admit([known], 0.0)[0])
    assert outcomes[0].replica == outcomes[1].replica == "b"
    assert outcomes[0].predicted_ttft_s == outcomes[1].predicted_ttft_s
    twice = fleet("a", prefix_affinity=5.0)
    first, second = (twice.admit([ask(Slo(0.3, 0.03, tier="tight"), 4000, prefix=PROMPT)], 0.0)[0] for _ in range(2))
    assert second.predicted_ttft_s > first.predicted_ttft_s


def test_affinity_keeps_to_the_order_of_tiers() -> None:
    """A tight replica that knows the prompt of a loose request is no reason to promote it."""
    state = fleet("ab", replicas=1, prefix_affinity=5.0)
    assert state.admit([ask(TIGHT, 300, prefix=PROMPT)], 0.0)[0].replica == "a"
    assert state.admit([ask(LOOSE, 300, prefix=PROMPT)], 0.0)[0].replica == "b"


def test_best_effort_goes_where_least_of_it_is_to_compute() -> None:
    state = fleet("ab", prefix_affinity=1.0)
    state.admit([ask(FLEX, 320, prefix=PROMPT, exclude=("a",))], 0.0)
    assert state.admit([ask(FLEX, 300)], 0.0)[0].replica == "a", "b has more ahead"
    assert state.admit([ask(FLEX, 320, prefix=PROMPT)], 0.0)[0].replica == "b"


def test_a_reborn_replica_knows_nothing() -> None:
    state = fleet("ab", prefix_affinity=1.0)
    state.admit([ask(TIGHT, 300, prefix=PROMPT, exclude=("a",))], 0.0)
    state.report(Report("b", "2", 1, H200, 400_000, 0, 256, 8192, 0.0), 1.0)
    state.report(Report("a", "1", 2, H200, 400_000, 0, 256, 8192, 0.0), 1.0)
    assert len(state.replicas["b"].prefixes) == 0
    state.admit([ask(TIGHT, 300, prefix=PROMPT)], 1.0)
    assert state.affinity.hit_tokens == 0


def test_plain_balancers_prefer_what_is_known_too() -> None:
    state = fleet("ab", prefix_affinity=5.0, routing="least_loaded")
    assert [state.admit([ask(TIGHT, 300, prefix=PROMPT)], 0.0)[0].replica for _ in range(7)] == ["a"] * 5 + ["b"] * 2


def test_the_least_loaded_of_a_burst_is_as_of_each_request() -> None:
    state = fleet("abcd", routing="balanced")
    decisions = state.admit([ask(LOOSE) for _ in range(8)], 0.0)
    assert Counter(d.replica for d in decisions) == dict.fromkeys("abcd", 2)
