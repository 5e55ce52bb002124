"""Parts of the fleet's size: their sum is what Serve is asked for, whoever came, went, or set it by hand."""

from controller.scaling.signals import Serve
from controller.shards.sizes import Sizes


def followed(replicas: int, live: list[int]) -> Sizes:
    sizes = Sizes()
    assert sizes.follow(Serve(replicas, replicas), live, replicas) is None
    return sizes


def test_each_asks_for_its_own_and_serve_for_the_sum() -> None:
    sizes = followed(6, [0, 1, 2])
    assert sizes.parts == {0: 2, 1: 2, 2: 2}
    assert sizes.total_with(2, 5) == 9
    assert sizes.parts[2] == 2, "not before Serve has taken it"
    sizes.ask(2, 5)
    assert sizes.follow(Serve(9, 6), [0, 1, 2], 6) is None
    assert sizes.parts == {0: 2, 1: 2, 2: 5}, "what Serve says now is what it was asked for"
    sizes.removed(2, 1)
    assert sizes.parts[2] == 4


def test_a_part_says_what_runs_and_what_has_no_room() -> None:
    sizes = followed(4, [0, 1])
    sizes.ask(0, 4)
    sizes.ask(1, 5)
    sizes.follow(Serve(9, 4, 1.0, unplaced=3), [0, 1], 4)
    first, second = (sizes.part(shard, {0: 2, 1: 2}) for shard in (0, 1))
    assert first is not None
    assert second is not None
    assert (first.replicas, first.running, first.unplaced) == (4, 2, 2)
    assert (second.replicas, second.running, second.unplaced) == (5, 2, 1)
    assert sizes.part(2, {}) is None


def test_a_size_set_by_hand_is_divided_and_not_taken_for_a_move() -> None:
    sizes = followed(4, [0, 1])
    moves = sizes.moves
    sizes.follow(Serve(7, 4), [0, 1], 4)
    assert sizes.parts == {0: 4, 1: 3}
    assert sizes.moves == moves


def test_when_a_shard_goes_the_others_answer_for_all() -> None:
    sizes = followed(6, [0, 1, 2])
    moves = sizes.moves
    sizes.follow(Serve(6, 6), [0, 2], 6)
    assert sizes.parts == {0: 3, 2: 3}
    assert sizes.moves == moves + 1


def test_what_a_deploy_reset_is_asked_for_again() -> None:
    sizes = followed(4, [0, 1])
    sizes.ask(0, 6)
    sizes.follow(Serve(8, 8, deployed=1.0), [0, 1], 4)
    assert sizes.follow(Serve(4, 8, deployed=2.0), [0, 1], 4) == 8
    assert sizes.parts == {0: 6, 1: 2}
    assert sizes.follow(Serve(5, 8, deployed=2.0), [0, 1], 4) is None, "that was somebody's wish"


def test_a_number_that_a_deploy_changed_is_not_undone() -> None:
    for configured in (4, 8):  # the deploy's own options come later than Serve tells of it, or before
        sizes = followed(4, [0, 1])
        sizes.ask(0, 6)
        sizes.follow(Serve(8, 8, deployed=1.0), [0, 1], 4)
        sizes.ask(0, 3)
        assert sizes.follow(Serve(8, 5, deployed=2.0), [0, 1], configured) is None
        assert sizes.parts == {0: 4, 1: 4}


def test_a_reset_that_serve_does_not_take_back_is_nobodys_wish() -> None:
    sizes = followed(4, [0, 1])
    sizes.ask(0, 6)
    sizes.follow(Serve(8, 8, deployed=1.0), [0, 1], 4)
    moves = sizes.moves
    assert sizes.follow(Serve(4, 8, deployed=2.0), [0, 1], 4) == 8
    assert sizes.follow(Serve(4, 4, deployed=2.0), [0, 1], 4) is None, "Serve has refused"
    assert sizes.parts == {0: 2, 1: 2}
    assert sizes.moves == moves + 1
    sizes.follow(Serve(6, 4, deployed=2.0), [0, 1], 4)
    assert sizes.moves == moves + 1, "that was somebody's wish"


def test_what_a_deploy_reset_is_asked_for_again_up_to_the_maximum() -> None:
    """Replicas beyond it, which somebody had set by hand, would start only to be drained."""
    sizes = followed(4, [0, 1])
    sizes.follow(Serve(9, 9, deployed=1.0), [0, 1], 4, most=7)
    hands, moves = sizes.hands, sizes.moves
    assert sizes.follow(Serve(4, 9, deployed=2.0), [0, 1], 4, most=7) == 7
    assert sizes.follow(Serve(7, 4, deployed=2.0), [0, 1], 4, most=7) is None
    assert (sizes.parts, sizes.hands, sizes.moves) == ({0: 4, 1: 3}, hands, moves + 1)


def test_a_reset_that_serve_takes_back_moves_nothing() -> None:
    sizes = followed(4, [0, 1])
    sizes.ask(0, 6)
    sizes.follow(Serve(8, 8, deployed=1.0), [0, 1], 4)
    moves = sizes.moves
    sizes.follow(Serve(4, 8, deployed=2.0), [0, 1], 4)
    for replicas in (8, 4):  # what was asked for again; then somebody's wish
        assert sizes.follow(Serve(replicas, 8, deployed=2.0), [0, 1], 4) is None
    assert (sizes.parts, sizes.moves) == ({0: 2, 1: 2}, moves)
