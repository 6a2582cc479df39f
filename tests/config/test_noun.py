from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from etude.axes.names import Form
from etude.config.noun import Many, Noun, OnlyWhen, Word, choices, fields_below, noun_within


class Wheel(Noun):
    size: float = Field(default=1.0, gt=0)


class Cart(Noun):
    kind: Literal["hand", "horse"] = "hand"
    horses: Annotated[int | None, OnlyWhen('kind is "horse"', lambda cart: cart.kind == "horse", default=2)] = None
    speed: Annotated[
        float, OnlyWhen('kind is "horse"', lambda cart: cart.kind == "horse", default_of=lambda cart: cart.horses * 1.5)
    ] = 1.0
    tags: Annotated[dict[str, str], OnlyWhen("horses pull", lambda cart: cart.kind == "horse")] = {}  # noqa: RUF012
    wheels: Many[Wheel] = (Wheel(),)
    spare: Wheel | None = None
    form: Word[Form] = Form.K1


def test_a_dependent_field_is_filled_where_its_condition_holds():
    cart = Cart(kind="horse")
    assert (cart.horses, cart.speed, cart.tags) == (2, 3.0, {})


def test_it_keeps_its_declared_default_where_the_condition_does_not_hold():
    assert (Cart().horses, Cart().speed) == (None, 1.0)


def test_what_was_written_wins_over_the_filled_default():
    cart = Cart(kind="horse", horses=4)
    assert (cart.horses, cart.speed) == (4, 6.0)


def test_writing_what_would_do_nothing_is_refused():
    with pytest.raises(ValidationError, match='horses = 3 does nothing here, it counts only when kind is "horse"'):
        Cart(horses=3)


def test_writing_the_value_it_has_anyway_is_not_refused():
    assert Cart(speed=1.0).speed == 1.0


@pytest.mark.parametrize("wrong", [{"speed": "1"}, {"speed": True}, {"horses": 2.0}, {"colour": "red"}, {"wheels": 3}])
def test_types_are_strict_and_keys_are_known(wrong: dict[str, object]):
    with pytest.raises(ValidationError):
        Cart.model_validate({"kind": "horse"} | wrong)


def test_arrays_become_tuples_and_words_become_members():
    cart = Cart.model_validate({"wheels": [{"size": 2}], "form": "k3"})
    assert cart.wheels == (Wheel(size=2.0),)
    assert cart.form is Form.K3


def test_a_table_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Cart().speed = 2.0  # pyright: ignore[reportAttributeAccessIssue]


def test_the_schema_is_read_off_the_classes():
    assert [key for key, _ in fields_below(Cart)] == [
        "kind",
        "horses",
        "speed",
        "tags",
        "wheels",
        "wheels.0.size",
        "spare",
        "spare.size",
        "form",
    ]
    assert noun_within(Cart.model_fields["spare"].annotation) is Wheel
    assert noun_within(int | None) is None
    assert choices(Cart.model_fields["form"].annotation) == ["k1", "k2", "k3"]
    assert choices(Cart.model_fields["kind"].annotation) == ["hand", "horse"]
    assert choices(float) == []
