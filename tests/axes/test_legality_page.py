from __future__ import annotations

import re
from pathlib import Path

from etude.axes.legality import RULES, Point
from etude.axes.legality_page import AXES, legality_page

PAGE = Path(__file__).parents[2] / "docs" / "legality.md"


def rows_of(page: str) -> list[list[str]]:
    table = page.partition("## The table")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_committed_page_is_the_printed_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == legality_page(), "run `make legality-page`"


def test_every_word_of_the_table_is_explained() -> None:
    assert list(AXES) == list(Point().axes)
    assert {axis for rule in RULES for axis in rule.when} <= AXES.keys()


def test_every_rule_has_its_row_in_the_order_that_decides() -> None:
    rows = rows_of(legality_page())
    assert [row[0] for row in rows] == [f"`{rule.name}`" for rule in RULES]
    assert [row[2] for row in rows] == [f"**{rule.kind}**" for rule in RULES]


def test_rows_by_hand() -> None:
    rows = {row[0].strip("`"): row[1:] for row in rows_of(legality_page())}
    assert rows["k1-loss"] == [
        "estimator: `analytic`; form: `k1`",
        "**refused**",
        "differentiating k1 = log student - log teacher on the student's own tokens has an expected gradient of zero",
        'estimator = "policy_gradient" (k1 as a detached reward), or form = "k2"',
    ]
    assert rows["sampled-divergence"][0] == "support: `sampled`; divergence: all but `reverse_kl`"
    assert rows["uncorrected-steps"][0] == "steps: `several`; importance: `none` or does not apply"
    assert rows["label-support"][0] == "teacher: `label`; support: `sampled` or `top_k`"
    assert rows["sampled"][0] == "whatever is left"


def test_no_cell_breaks_the_table() -> None:
    tables = [line for line in legality_page().splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} <= {3, 4, 6}  # two, three or five columns
    assert not re.search(r"KL\([^)]*\|", legality_page())  # a bar inside a cell would be read as its edge
