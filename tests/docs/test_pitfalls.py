"""Every snippet of the page on pitfalls runs and gives the numbers printed there."""

from __future__ import annotations

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "pitfalls.md"


def test_its_snippets_give_the_numbers_on_the_page() -> None:
    failures, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 25
    assert failures == 0, "see the captured output"
