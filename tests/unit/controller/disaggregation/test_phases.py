"""Sides of a disaggregated fleet: who prefills, and when a replica changes sides."""

import pytest

from controller.disaggregation.phases import Phase, PhaseOptions, Phases, PhaseView

OPTIONS = PhaseOptions(prefill=2, window_s=1.0, cooldown_s=5.0)


def fleet(count: int = 6, options: PhaseOptions = OPTIONS, **bound: str) -> Phases:
    phases = Phases(options)
    phases.set_replicas(dict.fromkeys((f"r{i}" for i in range(count)), "") | bound)
    return phases


def run(phases: Phases, prefill: float, decode: float, from_s: float, seconds: float, **silent: bool) -> list[str]:
    """Replicas that move while both sides are so busy."""
    moved = []
    for tick in range(int(seconds * 2)):
        phase = {**dict.fromkeys(phases.on(Phase.PREFILL), prefill), **dict.fromkeys(phases.on(Phase.DECODE), decode)}
        views = [PhaseView(name, busy, name not in silent) for name, busy in phase.items()]
        if move := phases.step(views, from_s + tick / 2):
            moved.append(move.name)
            assert phases.of(move.name) == move.to
    return moved


def test_the_first_by_name_prefill() -> None:
    assert fleet().on(Phase.PREFILL) == ["r0", "r1"]
    assert fleet().of("nobody") is None


def test_a_bound_replica_stays_and_does_not_count_as_free() -> None:
    phases = fleet(3, PhaseOptions(prefill=1), p0="prefill", d0="decode")
    assert phases.on(Phase.PREFILL) == ["p0", "r0"]
    assert run(phases, 0.1, 2.0, 0.0, 60.0) == ["r0"], "only what is free can move"


def test_a_replacement_takes_the_side_of_the_one_that_left() -> None:
    phases = fleet()
    phases.set_replicas(dict.fromkeys(("r1", "r2", "r3", "r4", "r5", "x"), ""))
    assert phases.on(Phase.PREFILL) == ["r1", "x"]


def test_a_newcomer_takes_the_side_of_one_that_is_silent() -> None:
    phases = fleet(4, PhaseOptions(prefill=1, adapt=False))
    known = dict.fromkeys(("r0", "r1", "r2", "r3"), "")
    phases.set_replicas(known | {"x": ""}, absent={"r0"})
    assert phases.on(Phase.PREFILL) == ["r0", "x"]
    views = [PhaseView(name, 0.5, name != "r0") for name in ("r0", "r1", "r2", "r3", "x")]
    assert phases.step(views, 0.0) is None, "nobody knows yet whether it comes back"
    back = [PhaseView(name, 0.1 if name == "r0" else 0.5) for name in ("r0", "r1", "r2", "r3", "x")]
    move = phases.step(back, 1.0)
    assert move is not None
    assert move.name == "r0"
    assert phases.on(Phase.PREFILL) == ["x"]


def test_one_that_left_is_replaced_from_the_other_side() -> None:
    phases = fleet(4, PhaseOptions(prefill=1, adapt=False))
    phases.set_replicas(dict.fromkeys(("r1", "r2", "r3"), ""))
    views = [PhaseView("r1", 0.5), PhaseView("r2", 0.1), PhaseView("r3", 0.5)]
    move = phases.step(views, 0.0)
    assert move is not None
    assert (move.name, move.to) == ("r2", Phase.PREFILL)
    assert phases.step(views, 1.0) is None


@pytest.mark.parametrize(("prefill", "decode", "grows"), [(0.95, 0.3, Phase.PREFILL), (0.1, 1.2, Phase.DECODE)])
def test_the_side_that_is_short_gets_one_at_a_time(prefill: float, decode: float, grows: Phase) -> None:
    phases = fleet()
    before = len(phases.on(grows))
    assert len(run(phases, prefill, decode, 0.0, 6.0)) == 1
    assert len(phases.on(grows)) == before + 1


def test_the_last_replica_of_a_side_stays() -> None:
    phases = fleet(3, PhaseOptions(prefill=1, window_s=1.0, cooldown_s=1.0))
    run(phases, 0.0, 5.0, 0.0, 60.0)
    assert phases.on(Phase.PREFILL) == ["r0"]


def test_the_last_replica_of_a_side_stays_where_the_other_lacks_what_is_configured() -> None:
    """One of each of two and two is lost: without a replica that decodes, nothing is served by phases."""
    phases = Phases(PhaseOptions(prefill=2))
    phases.set_replicas(dict.fromkeys("abcd", ""))
    left = [phases.on(phase)[0] for phase in Phase]
    phases.set_replicas(dict.fromkeys(left, ""))
    moves = [phases.step([PhaseView(name, 0.5) for name in left], 0.5 * k) for k in range(200)]
    assert moves == [None] * 200
    assert [len(phases.on(phase)) for phase in Phase] == [1, 1]


def test_nothing_moves_where_both_are_short() -> None:
    assert run(fleet(), 0.95, 0.9, 0.0, 60.0) == []


def test_constant_load_does_not_flap() -> None:
    """Work shared by however many are on its side: one move, then rest."""
    phases, moved = fleet(), []
    for tick in range(400):
        prefill, decode = 1.9 / len(phases.on(Phase.PREFILL)), 1.5 / len(phases.on(Phase.DECODE))
        sides = [
            (name, prefill if phases.of(name) == Phase.PREFILL else decode) for name in map("r{}".format, range(6))
        ]
        if move := phases.step([PhaseView(*phase) for phase in sides], tick / 2):
            moved.append(move)
    assert [move.to for move in moved] == [Phase.PREFILL]


def test_it_holds_still_while_a_replica_is_silent() -> None:
    assert run(fleet(), 0.95, 0.1, 0.0, 30.0, r3=True) == []


def test_a_cooldown_is_in_seconds() -> None:
    phases = fleet(8, PhaseOptions(prefill=2, window_s=0.5, cooldown_s=10.0))
    assert run(phases, 1.0, 0.05, 0.0, 9.0) == []
    assert len(run(phases, 1.0, 0.05, 9.0, 9.0)) == 1


def test_switched_off_it_never_moves() -> None:
    assert run(fleet(options=PhaseOptions(prefill=2, adapt=False)), 1.0, 0.1, 0.0, 60.0) == []


def test_a_newcomer_joins_the_phase_that_lacks_most_of_its_need() -> None:
    phases, needs = fleet(4), {Phase.PREFILL: 2.2, Phase.DECODE: 3.1}
    known = dict.fromkeys(("r0", "r1", "r2", "r3"), "")
    phases.set_replicas(known | {"x": ""}, needs=needs)
    assert phases.of("x") == Phase.DECODE
    phases.set_replicas(known | {"x": "", "y": ""}, absent={"r0"}, needs=needs)
    assert phases.of("y") == Phase.PREFILL, "one is to leave"
    views = [PhaseView(name, 0.5, is_staying=name != "r0") for name in (*known, "x", "y")]
    assert phases.step(views, 0.0) is None, "no number is to be kept where the size follows the load"


def test_what_leaves_neither_moves_nor_counts() -> None:
    phases = fleet(3)
    phases.set_replicas(dict.fromkeys(("r0", "r1", "r2"), ""), absent={"r0"}, needs={Phase.PREFILL: 1.0})
    for tick in range(60):
        views = [PhaseView("r0", 0.0, is_staying=False), PhaseView("r1", 0.1), PhaseView("r2", 2.0)]
        assert phases.step(views, tick / 2) is None, "r1 is the last that prefills"


@pytest.mark.parametrize(("before", "now", "prefilling"), [(1, 1, 1), (1, 2, 2), (2, 1, 1)])
def test_a_deploy_changes_how_many_prefill(before: int, now: int, prefilling: int) -> None:
    old = Phases(PhaseOptions(prefill=before, adapt=False))
    old.set_replicas(dict.fromkeys("abcd", ""))
    new = Phases(PhaseOptions(prefill=now, adapt=False))
    new.adopt_state(old)
    new.set_replicas(dict.fromkeys("abcd", ""))
    for k in range(10):
        new.step([PhaseView(name, 0.1) for name in "abcd"], 0.5 * k)
    assert len(new.on(Phase.PREFILL)) == prefilling
