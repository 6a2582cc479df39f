from __future__ import annotations

import pytest

from etude.config.complaints import nearest, suggestion


@pytest.mark.parametrize(
    ("word", "expected"), [("shedule", "schedule"), ("schedule", "schedule"), ("", None), ("clip", None)]
)
def test_nearest(word: str, expected: str | None):
    assert nearest(word, ["learning_rate", "schedule"]) == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("gdk", "did you mean gkd?"),  # letters swapped, in a word so short that little else agrees
        ("scop", "did you mean scope?"),
        ("nope", "expected one of gkd, scope"),
    ],
)
def test_only_a_near_name_is_suggested(word: str, expected: str):
    assert suggestion(word, ["gkd", "scope"]) == expected
