from __future__ import annotations

import pytest

from etude.config.complaints import nearest


@pytest.mark.parametrize(
    ("word", "expected"), [("shedule", "schedule"), ("schedule", "schedule"), ("", None), ("clip", None)]
)
def test_nearest(word: str, expected: str | None):
    assert nearest(word, ["learning_rate", "schedule"]) == expected
