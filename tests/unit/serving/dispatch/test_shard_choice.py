"""Which shards are asked about a request, and in which order."""

import math
import random
from collections import Counter
from collections.abc import Iterable

import pytest

from protocol.messages import AdmissionRequest, Decision, Slo, Traits, Verdict
from protocol.programs import Program
from serving.dispatch.shard_choice import Ask, Place, Stand, groups_of, home_of, plan_asks, stand_of

INF = math.inf
LOADS = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
PROGRAM, SESSION = Program("task"), Program("talk", is_session=True)


def ask(name: str = "r", group: str = "", best_effort: bool = False, **more: object) -> AdmissionRequest:
    return AdmissionRequest(name, 10, 10, Slo(1.0, 0.1, best_effort=best_effort), group=group, **more)  # type: ignore[arg-type]


def plans(question: AdmissionRequest, loads: dict[int, float], place: Place | None = None) -> set[tuple[Ask, ...]]:
    """All that come out in many tries."""
    rng = random.Random(1)
    return {plan_asks(question, loads, rng, place) for _ in range(200)}


def firsts(found: Iterable[tuple[Ask, ...]]) -> set[int]:
    return {first.shard for first, *_ in found}


def shards_in(found: Iterable[tuple[Ask, ...]]) -> set[int]:
    return {each.shard for asks in found for each in asks}


def home_by_prompt(digest: int) -> int:
    return home_of(f"{digest}\n10", LOADS)


@pytest.mark.parametrize("digest", range(8))
def test_the_less_loaded_of_home_and_another_is_asked_first_and_home_has_the_last_word(digest: int) -> None:
    home, found = home_by_prompt(digest), plans(ask(prompt_digest=digest), LOADS)
    last = Ask(home, False)
    lighter = {(Ask(other, True), last) for other in LOADS if other < home}
    assert found == lighter | {(Ask(home, True), Ask(other, True), last) for other in LOADS if other > home}


def test_homes_of_prompts_are_spread_over_all_shards() -> None:
    homes = Counter(home_by_prompt(digest) for digest in range(4000))
    assert len(homes) == len(LOADS)
    assert min(homes.values()) > 900


def test_the_same_seed_gives_the_same_order() -> None:
    first, second = ([plan_asks(ask(), LOADS, rng) for _ in range(50)] for rng in (random.Random(3), random.Random(3)))
    assert first == second


def test_a_single_shard_has_the_last_word_and_none_gives_no_order() -> None:
    assert plans(ask(), {2: 0.5}) == {(Ask(2, False),)}
    assert plans(ask(program=SESSION), {2: 0.5}) == {(Ask(2, False),)}
    assert plans(ask(), {}) == {()}


def test_best_effort_asks_the_less_loaded_of_two_only() -> None:
    found = plans(ask(best_effort=True), LOADS)
    assert found == {(Ask(shard, False),) for shard in (0, 1, 2)}, "the most loaded one is never the less loaded"


def test_who_has_no_replica_is_asked_only_where_nobody_has_one() -> None:
    for digest in range(8):
        assert shards_in(plans(ask(prompt_digest=digest), {0: 0.9, 1: INF, 2: 0.1})) == {0, 2}
    assert firsts(plans(ask(program=PROGRAM), {0: INF, 1: 0.5, 2: INF})) == {1}
    assert shards_in(plans(ask(best_effort=True), dict.fromkeys(range(3), INF))) == {0, 1, 2}
    assert shards_in(plans(ask(), dict.fromkeys(range(3), INF))) == {0, 1, 2}


def test_a_program_asks_its_home_alone() -> None:
    (alone,) = plans(ask(program=PROGRAM), LOADS)
    assert len(alone) == 1
    assert not alone[0].may_hop
    assert alone[0].shard == home_of("\ntask", LOADS)
    assert firsts(plans(ask(program=PROGRAM, best_effort=True), LOADS)) == {alone[0].shard}


def test_a_call_that_waits_at_its_programs_home_goes_nowhere_else() -> None:
    """Another shard took it for the first call of a program of its own."""
    place = Place(home_of("\ntask", LOADS), Stand.WAITS)
    assert plans(ask(program=PROGRAM), LOADS, place) == {(Ask(place.shard, may_hop=False),)}
    assert place.shard not in firsts(plans(ask(program=PROGRAM), LOADS | {place.shard: INF}, place)), (
        "it has no replica"
    )
    assert len(shards_in(plans(ask(program=SESSION), LOADS, place))) > 1


@pytest.mark.parametrize("question", [ask(program=SESSION), ask(traits=Traits(program="talk"))])
def test_a_session_asks_its_home_first_and_last_and_any_other_between(question: AdmissionRequest) -> None:
    home = home_of("\ntalk", LOADS)
    others = LOADS.keys() - {home}
    for load in (0.0, 9.0):  # its cached prefixes are worth more than an idle shard
        asks = plans(question, LOADS | {home: load})
        assert asks == {(Ask(home, True), Ask(other, True), Ask(home, False)) for other in others}


def test_homes_are_spread_and_only_those_of_a_shard_that_goes_move() -> None:
    names = [f"program-{i}" for i in range(3000)]
    before = {name: home_of(name, range(4)) for name in names}
    after = {name: home_of(name, (0, 1, 3)) for name in names}
    assert min(Counter(before.values()).values()) > 600
    assert {name for name in names if before[name] != after[name]} == {name for name in names if before[name] == 2}


def test_programs_of_one_name_and_different_tenants_have_homes_of_their_own() -> None:
    homes = {plan_asks(ask(program=PROGRAM, tenant=str(i)), LOADS, random.Random(0))[0].shard for i in range(50)}
    assert homes == set(LOADS)


def test_what_waits_keeps_its_place_and_another_is_asked_first_only_if_it_is_less_loaded() -> None:
    assert plans(ask(), LOADS, Place(0, Stand.WAITS)) == {(Ask(0, False),)}
    assert plans(ask(), LOADS, Place(3, Stand.WAITS)) == {(Ask(0, True), Ask(3, False)), (Ask(1, True), Ask(3, False))}
    assert firsts(plans(ask(), {0: 0.5, 1: INF}, Place(1, Stand.WAITS))) == {0}


def test_a_place_at_a_shard_that_does_not_answer_counts_no_more() -> None:
    loads = {0: 0.1, 1: 0.2}
    assert plans(ask(), loads, Place(3, Stand.WAITS)) == plans(ask(), loads)
    assert plans(ask(), loads, Place(3, Stand.PLACED)) == plans(ask(), loads)


def test_what_has_a_replica_goes_on_in_the_same_part_of_the_fleet() -> None:
    assert plans(ask(), LOADS, Place(3, Stand.PLACED)) == {(Ask(3, False),)}
    assert plans(ask(), LOADS, Place(3, Stand.REFUSED)) == plans(ask(), LOADS)


@pytest.mark.parametrize(
    ("verdict", "replica", "stand"),
    [
        (Verdict.ADMITTED, "a", Stand.PLACED),
        (Verdict.BEST_EFFORT, "a", Stand.PLACED),
        (Verdict.PENDING, "", Stand.WAITS),
        (Verdict.REFUSED, "", Stand.REFUSED),
    ],
)
def test_what_a_decision_leaves(verdict: Verdict, replica: str, stand: Stand) -> None:
    assert stand_of(Decision("r", verdict, replica, "chat", "")) == stand


def test_sequences_of_one_request_stay_together() -> None:
    batch = [ask("a", "g"), ask("b"), ask("c", "g"), ask("d"), ask("e", "h")]
    found = [[question.request_id for question in group] for group in groups_of(batch)]
    assert sorted(found) == [["a", "c"], ["b"], ["d"], ["e"]]
