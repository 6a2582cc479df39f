"""Scalars of the step against values worked out by hand, and the laws all kinds share."""

from __future__ import annotations

import math
from typing import Any

import pytest

from etude.axes.schedules import Kind, Ramp, as_ramp

MOVING: tuple[Kind, ...] = ("linear", "cosine", "step")
every_moving_kind = pytest.mark.parametrize("kind", MOVING)


def ramp(kind: Kind, start: float, end: float, first: int, last: int) -> Ramp:
    return Ramp(start, end, kind=kind, first=0 if kind == "step" else first, last=last)


def values(scalar: Ramp, steps: range) -> list[float]:
    return [scalar.value(step) for step in steps]


# Values known beforehand ----------------------------------------------------------------------------------------------


def test_a_constant_stays() -> None:
    assert values(Ramp(0.3), range(3)) == [0.3, 0.3, 0.3]


def test_linear_up_and_down() -> None:
    assert values(Ramp(0.0, 2.0, kind="linear", last=4), range(6)) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]
    assert values(Ramp(4.0, 1.0, kind="linear", first=1, last=4), range(6)) == [4.0, 4.0, 3.0, 2.0, 1.0, 1.0]


def test_cosine() -> None:
    """Over six steps the angles are 30 degrees apart: (1 - cos) / 2 is (1 - sqrt(3)/2) / 2, 1/4, 1/2, 3/4, ..."""
    eighth = (1.0 - math.sqrt(3.0) / 2.0) / 2.0
    by_hand = [0.0, 4 * eighth, 1.0, 2.0, 3.0, 4 - 4 * eighth, 4.0]
    assert values(Ramp(0.0, 4.0, kind="cosine", last=6), range(7)) == pytest.approx(by_hand, abs=1e-12)


def test_a_step_jumps_at_its_step() -> None:
    assert values(Ramp(1.0, 3.0, kind="step", last=2), range(4)) == [1.0, 1.0, 3.0, 3.0]
    assert values(Ramp(1.0, 3.0, kind="step", last=1), range(2)) == [1.0, 3.0]


def test_a_growing_horizon_in_tokens() -> None:
    """8 + 56 u: 8, 26.67, 45.33, 64; and halves go up."""
    assert [Ramp(8, 64, kind="linear", last=3).whole(step) for step in range(5)] == [8, 27, 45, 64, 64]
    assert [Ramp(0, 5, kind="linear", last=2).whole(step) for step in range(3)] == [0, 3, 5]


def test_rounding_takes_no_token_from_a_horizon() -> None:
    """One token a step: whatever u is in floating point, step s gives s tokens."""
    horizon = Ramp(0, 1000, kind="linear", last=1000)
    assert [horizon.whole(step) for step in range(1001)] == list(range(1001))


# Laws -----------------------------------------------------------------------------------------------------------------


@every_moving_kind
@pytest.mark.parametrize(("start", "end"), [(0.1, 0.7), (1.0, 0.0), (-2.0, 3.0), (1 / 3, 0.1)])
def test_start_before_end_after_and_monotone_between(kind: Kind, start: float, end: float) -> None:
    scalar = ramp(kind, start, end, first=3, last=17)
    assert values(scalar, range(4)) == [start] * 4
    assert values(scalar, range(17, 20)) == [end] * 3
    path = values(scalar, range(20))
    assert path == sorted(path, reverse=start > end)
    assert (scalar.lowest, scalar.highest) == (min(path), max(path)) == (min(start, end), max(start, end))


@every_moving_kind
def test_the_way_down_mirrors_the_way_up(kind: Kind) -> None:
    up, down = ramp(kind, 0.0, 1.0, first=2, last=9), ramp(kind, 1.0, 0.0, first=2, last=9)
    assert [up.value(s) + down.value(s) for s in range(12)] == pytest.approx([1.0] * 12, abs=1e-15)


@every_moving_kind
def test_no_value_leaves_the_ends(kind: Kind) -> None:
    """A beta of 1.0000000000000002 would be refused in the middle of a run."""
    for start in (0.1, 0.3, 0.7, 0.9):
        scalar = ramp(kind, start, 1.0, first=0, last=997)
        assert all(start <= value <= 1.0 for value in values(scalar, range(1000)))


# Equal to numbers -----------------------------------------------------------------------------------------------------


def test_what_never_changes_is_its_number() -> None:
    flat = Ramp(0.5, 0.5, kind="cosine", first=1, last=4)
    assert Ramp(0.5) == 0.5 == flat
    assert Ramp(0.5) == flat
    assert hash(Ramp(0.5)) == hash(0.5) == hash(flat)
    assert Ramp(1.0) == 1
    assert {Ramp(0.5), flat, 0.5} == {0.5}
    assert values(flat, range(6)) == [0.5] * 6
    assert flat.constant
    assert Ramp(0.5).constant


def test_what_changes_is_no_number() -> None:
    moving = Ramp(0.5, 1.0, kind="linear", last=4)
    assert moving not in (0.5, 1.0)
    assert not moving.constant
    assert moving == Ramp(0.5, 1.0, kind="linear", last=4)
    assert hash(moving) == hash(Ramp(0.5, 1.0, kind="linear", last=4))
    others = [
        Ramp(0.4, 1.0, kind="linear", last=4),
        Ramp(0.5, 0.9, kind="linear", last=4),
        Ramp(0.5, 1.0, kind="cosine", last=4),
        Ramp(0.5, 1.0, kind="linear", first=1, last=4),
        Ramp(0.5, 1.0, kind="linear", last=5),
    ]
    assert all(moving != other for other in others)
    assert Ramp(0.5) != "0.5"


def test_a_number_becomes_the_ramp_that_stays() -> None:
    moving = Ramp(0.5, 1.0, kind="linear", last=4)
    assert as_ramp(0.25) == Ramp(0.25)
    assert as_ramp(moving) is moving


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kind": "quadratic"}, "kind 'quadratic'; expected one of constant, linear, cosine, step"),
        ({"start": math.nan}, "from nan to nan; expected finite"),
        ({"end": math.inf, "kind": "linear", "last": 3}, "from 1.0 to inf; expected finite"),
        ({"end": 0.0}, "constant of 1.0 has end 0.0"),
        ({"last": 3}, "constant of 1.0 has end None, first 0, last 3"),
        ({"first": 3}, "constant of 1.0 has end None, first 3"),
        ({"kind": "linear", "last": 3}, "linear ramp has end None and last 3"),
        ({"kind": "step", "end": 0.0}, "step ramp has end 0.0 and last None"),
        ({"kind": "step", "end": 0.0, "first": 1, "last": 3}, "step ramp has first 1; it jumps at `last`, 3"),
        ({"kind": "cosine", "end": 0.0, "first": 3, "last": 3}, "over steps 3 to 3; expected 0 <= first < last"),
        ({"kind": "linear", "end": 0.0, "first": -1, "last": 3}, "over steps -1 to 3; expected 0 <= first < last"),
        ({"kind": "step", "end": 0.0, "last": 0}, "over steps 0 to 0; expected 0 <= first < last"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Ramp(**{"start": 1.0, **fields})
