from __future__ import annotations

import json

import pytest

from etude.errors import RecipeError
from etude.models.adaptive import AdaptiveFraction


def heard(phi: AdaptiveFraction, *divergences: float) -> list[float]:
    """The share after each of these measurements."""
    found: list[float] = []
    for divergence in divergences:
        phi.observe({"heldout/length": 3.0, "heldout/reverse_kl": divergence})
        found.append(phi.value(step=7))
    return found


def test_it_rises_where_the_student_gets_worse_and_measures_from_there() -> None:
    """Powers of two, so that sums are exact: 1 + 1/8 is reached at the fourth, 1 1/8 + 1/8 at the last."""
    phi = AdaptiveFraction(rise=0.25, tolerance=0.125)
    assert heard(phi, 1.0, 0.5, 1.0625, 1.125, 1.1875, 0.25, 1.25) == [0.0, 0.0, 0.0, 0.25, 0.25, 0.25, 0.5]
    assert phi.reference == 1.25


def test_the_reference_stays_where_the_student_gets_better() -> None:
    """As published: from 1 down to 0 and back up to 1 is no rise."""
    assert heard(AdaptiveFraction(), 1.0, 0.0, 1.0, 1.099) == [0.0] * 4


def test_the_first_measurement_raises_nothing() -> None:
    assert heard(AdaptiveFraction(0.5), 100.0) == [0.5]


def test_it_stops_at_one_and_never_falls() -> None:
    assert heard(AdaptiveFraction(0.5, rise=0.25), 0, 1, 2, 3, 0, 9) == [0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


def test_published_values() -> None:
    phi = AdaptiveFraction()
    assert (phi.fraction, phi.rise, phi.tolerance, phi.reference) == (0.0, 0.1, 0.1, None)


def test_what_is_not_a_number_raises_nothing() -> None:
    assert heard(AdaptiveFraction(), 1.0, float("nan")) == [0.0, 0.0]


def test_it_comes_back() -> None:
    phi, again = AdaptiveFraction(0.25), AdaptiveFraction(0.25)
    heard(phi, 1.0, 1 / 3, 5 / 3)
    again.restore(json.loads(json.dumps(phi.facts())))
    assert again == phi
    fresh = AdaptiveFraction(0.25)
    fresh.restore(json.loads(json.dumps(AdaptiveFraction(0.25).facts())))
    assert fresh.reference is None


def test_an_evaluation_without_the_divergence_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"follows heldout/reverse_kl, and the evaluation measured heldout/length"):
        AdaptiveFraction().observe({"heldout/length": 3.0})
    with pytest.raises(RecipeError, match="measured nothing; name a"):
        AdaptiveFraction().observe({})


@pytest.mark.parametrize(
    "values", [{"fraction": 1.1}, {"fraction": -0.1}, {"rise": 0.0}, {"rise": 1.5}, {"tolerance": -0.1}]
)
def test_what_is_no_share(values: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match="write a share from 0 to 1"):
        AdaptiveFraction(**values)
