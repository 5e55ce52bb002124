"""A disaggregated fleet's size follows the demand of both phases, and its ratio theirs."""

import pytest

from controller.disaggregation.phases import LINGER_S, Phase
from controller.scaling.demand import Load, after_prefill, prefill_replicas, with_backlog
from controller.scaling.draining import Drained
from controller.scaling.needs import Needs, apart_size, spare_replicas
from controller.scaling.role import ReplicaView
from controller.scaling.signals import ScalingOptions
from tests.support.scaling_cases import H100, PhaseWorld, table

BOTH = tuple(map(str, Phase))
PROMPTS, OUTPUTS = (4000, 10), (200, 600)  # tokens of a request that is prefilled for long, or decoded


def world(most: int = 10, replicas: int = 2, **rates: float) -> PhaseWorld:
    options = ScalingOptions(min_replicas=1, max_replicas=most, phases=BOTH)
    return PhaseWorld(options, replicas=replicas, rates=rates)


def counts(fleet: PhaseWorld) -> tuple[int, int]:
    return fleet.count(Phase.PREFILL), fleet.count(Phase.DECODE)


def test_each_phase_grows_with_what_is_asked_of_it() -> None:
    fleet = world(tight=25.0)
    fleet.run(150, PROMPTS)
    prefill, decode = counts(fleet)
    assert prefill > 2
    assert decode == 1
    fleet.run(300, OUTPUTS)
    fewer, more = counts(fleet)
    assert fewer < prefill
    assert more > decode
    assert fleet.scaler.phase_needs[Phase.DECODE] <= more, "as many as it takes"


@pytest.mark.parametrize("tokens", [(1000, 200), PROMPTS, OUTPUTS])
def test_constant_load_flaps_neither_in_size_nor_in_ratio(tokens: tuple[int, int]) -> None:
    fleet = world(30, tight=17.0, loose=8.0)
    fleet.run(300, tokens)
    settled, moved, before = len(fleet.sizes()), len(fleet.moved), counts(fleet)
    fleet.run(1200, tokens)
    assert len(fleet.sizes()) - settled <= 2, "a rare peak of random arrivals at most, and back"
    assert len(fleet.moved) - moved <= 1
    assert max(abs(a - b) for a, b in zip(counts(fleet), before, strict=True)) <= 1


def test_the_last_of_a_phase_stays() -> None:
    fleet = world(replicas=6, tight=30.0)
    fleet.run(100)
    fleet.rates = {}
    fleet.run(2000)
    assert counts(fleet) == (1, 1)
    assert fleet.wanted == 2, "though the minimum is one"


def test_the_phase_with_the_most_to_spare_gives_a_replica() -> None:
    fleet = world(replicas=6, tight=12.0)
    fleet.prefill = 1
    fleet.run(400, PROMPTS)
    assert fleet.removed
    assert fleet.count(Phase.DECODE) == 1
    assert fleet.count(Phase.PREFILL) >= fleet.scaler.phase_needs[Phase.PREFILL]


def test_missing_reports_never_shrink_it() -> None:
    fleet = world(replicas=4, tight=10.0)
    fleet.run(100)
    before, removed = fleet.wanted, len(fleet.removed)
    fleet.silent, fleet.rates = True, {}
    fleet.run(1000)
    assert (fleet.wanted, len(fleet.removed)) == (before, removed)


def test_the_maximum_is_of_both_phases_and_neither_starves() -> None:
    fleet = world(5, tight=120.0)
    fleet.run(300)
    assert max(fleet.asked) == fleet.wanted == 5
    assert min(counts(fleet)) >= 1


def view(name: str, phase: Phase, **told: bool) -> ReplicaView:
    return ReplicaView(name, (0, 0), phase=phase, **told)


def test_a_group_that_is_bound_to_a_phase_grows_for_that_alone() -> None:
    needs, others = Needs([2.0, 0.3], 3.2), [view(f"p/{i}", Phase.PREFILL, is_bound=True) for i in range(2)]
    assert apart_size(needs, others, "d", ("decode",)) == 2 + 3, "prefill has what it has"
    assert apart_size(needs, others, "d", BOTH) == 4 + 3
    assert apart_size(Needs([0.0, 0.0]), others, "d", BOTH) == 2 + 1, "what is bound stays, and one of each phase"


def test_of_a_single_replica_nothing_can_be_spared() -> None:
    views = [view("a", Phase.PREFILL), view("b", Phase.DECODE), view("c", Phase.DECODE)]
    spare = spare_replicas(views, {Phase.PREFILL: 0.0, Phase.DECODE: 0.5})
    assert spare == {Phase.PREFILL: float("-inf"), Phase.DECODE: 1.5}


def test_a_drained_replica_lingers_until_its_kv_caches_have_been_fetched() -> None:
    drained, apart, plain = Drained(), view("a", Phase.PREFILL), ReplicaView("b", (0, 0))
    for replica in (apart, plain):
        drained.begin(replica.name, 0.0)
    seen = {"a": apart, "b": plain}
    assert drained.ended("ab", seen, 300.0, 0.0) == ("b",)
    assert drained.ended("a", {"a": apart._replace(slo_requests=(1, 0))}, 300.0, LINGER_S) == (), "its last prompt"
    assert drained.ended("a", seen, 300.0, LINGER_S + 1.0) == ()
    assert drained.ended("a", seen, 300.0, 2.0 * LINGER_S + 1.0) == ("a",)


def test_work_is_divided_between_the_phases() -> None:
    load = Load(10.0, 10_000.0, 2_000.0)
    decode = after_prefill(load)
    assert (decode.context_tokens, decode.prefill_tokens_per_s) == (load.context_tokens, 0.0)
    prefill = prefill_replicas(table(), {"tight": load}, {}, H100, 1.0)
    apart = prefill + H100.replicas_for(decode, 0.02)
    assert 0.0 < prefill < H100.replicas_for(load, 0.02) < 1.6 * apart
    assert prefill_replicas(table(), {"tight": load}, {"tight": 3000.0}, H100, 1.0) > prefill


def test_those_that_wait_to_decode_count_as_if_they_ran() -> None:
    load = Load(10.0, 10_000.0, 2_000.0)
    more = with_backlog(load, 5_000.0, 0.02)
    assert more.decode_tokens_per_s == pytest.approx(2_000.0 + 5 / 0.02)
    assert more.context_tokens == pytest.approx(load.context_tokens)
    assert with_backlog(load, 0.0, 0.02) == with_backlog(load, 5_000.0, float("inf")) == load
