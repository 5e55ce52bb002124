"""Strict sections: how mistakes are told, whatever the section."""

from typing import Annotated, ClassVar, Self

import pytest
from pydantic import Strict, model_validator

from profiles.suggest import suggest
from serving.config.base import ConfigError, Section


class Wheel(Section):
    SHORT: ClassVar[str] = "kind"
    kind: str = "round"
    spokes: int = 32


class Cart(Section):
    wheel: Wheel = Wheel()
    spares: Annotated[tuple[Wheel, ...], Strict(False)] = ()
    load_kg: float

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.load_kg > 100:
            raise ValueError("load_kg: too heavy")
        return self


def test_string_stands_for_the_one_field() -> None:
    cart = Cart.read({"wheel": "square", "spares": ["flat", {"spokes": 8}], "load_kg": 1})
    assert (cart.wheel, cart.spares) == (Wheel(kind="square"), (Wheel(kind="flat"), Wheel(spokes=8)))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (None, "load_kg: is required"),
        ({"load_kg": 101}, "load_kg: too heavy"),
        ({"load_kg": 1, "wheels": 2}, "wheels: unknown key; did you mean 'wheel'?"),
        ({"load_kg": 1, "wheel": {"spoke": 2}}, "wheel.spoke: unknown key; did you mean 'spokes'?"),
        ({"load_kg": 1, "spares": [{}, {"x": 2}]}, "spares.1.x: unknown key; known: kind, spokes"),
        ({"load_kg": 1, "wheel": {"spokes": "8"}}, "wheel.spokes: input should be a valid integer, got '8'"),
        ({"load_kg": 1, 5: 2}, "5: keys should be strings, got 5"),
        ("cart", "configuration: must hold keys and values"),
        ({"load_kg": 1, "wheel": 4}, "wheel: must hold keys and values, or be a string, got 4"),
        ({"load_kg": 1, "spares": [4]}, "spares.0: must hold keys and values, or be a string, got 4"),
    ],
)
def test_mistake(settings: object, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        Cart.read(settings)
    assert str(error.value) == told


def test_a_mistake_further_down_is_named_from_the_top() -> None:
    for settings, told in (("cart", "args: must hold"), ({"load_kg": "x"}, "args.load_kg: input should be")):
        with pytest.raises(ConfigError) as error:
            Cart.read(settings)
        assert str(error.value.below("args")).startswith(told)


def test_suggest_names_the_nearest_or_all() -> None:
    assert suggest("spoks", ["kind", "spokes"]) == "did you mean 'spokes'?"
    assert suggest("zzz", ["kind", "spokes"]) == "known: kind, spokes"
