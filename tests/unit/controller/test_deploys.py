"""The latest deploy's options hold, whatever clocks, restarts and ingresses of earlier deploys do."""

import itertools

import pytest

from controller.deploys import Deploys


def test_deploys_are_in_the_order_in_which_they_were_first_heard() -> None:
    deploys = Deploys()
    assert [deploys.number(name) for name in "aabab"] == [1, 1, 2, 1, 2]


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_a_restarted_controller_learns_the_order_from_the_ingresses(order: tuple[str, ...]) -> None:
    """``c`` was deployed while the controller was away, so it has no number yet."""
    told, deploys = {"a": 3, "b": 4, "c": 0}, Deploys()
    for name in order:
        deploys.number(name, told[name])
    assert sorted("abc", key=deploys.number) == ["a", "b", "c"]


def test_deploys_that_were_numbered_here_stay_in_order_when_an_earlier_one_speaks() -> None:
    deploys = Deploys()
    for name in ("c", "d"):
        deploys.number(name)
    deploys.number("b", 7)
    assert sorted("bcd", key=deploys.number) == ["b", "c", "d"]
