from __future__ import annotations

import pytest

from etude.config.plain import is_array_of_tables, leaves, nested
from etude.errors import RecipeError

NESTED = {"seed": 0, "student": {"model": "a", "lora": {"rank": 8}}, "terms": [{"beta": 0.1}, {}], "stop": ["x"]}
FLAT = {
    "seed": 0,
    "student.model": "a",
    "student.lora.rank": 8,
    "terms.0.beta": 0.1,
    "terms.1": {},
    "stop": ["x"],
}


def test_flat_and_nested_are_the_same_data():
    assert dict(leaves(NESTED)) == FLAT
    assert nested(FLAT) == NESTED


def test_arrays_keep_their_places_whatever_the_order():
    assert nested({"terms.1.a": 1, "terms.0.a": 0}) == {"terms": [{"a": 0}, {"a": 1}]}


def test_an_array_with_a_gap_is_refused():
    with pytest.raises(RecipeError, match=r"terms: found place 0, 2 of the array; expected 0, 1, \.\.\. without a gap"):
        nested({"terms.0.a": 0, "terms.2.a": 0})


@pytest.mark.parametrize(
    ("value", "expected"), [([{}], True), ([{"a": 1}, {}], True), ([], False), ([1, {}], False), ({}, False)]
)
def test_what_counts_as_an_array_of_tables(value: object, expected: bool):
    assert is_array_of_tables(value) is expected
