"""docs/methods.md has one entry a method, no other, and what it says of the point is the method's point.

A method without an entry fails here. To add one: a heading `### NAME`, the parts below, and the row that the failing
test prints.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from etude.config.load import load_recipe
from etude.config.methods import METHODS, Method
from etude.errors import LegalityError

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "methods.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
PARTS = ("When", "Numbers", "Reference")
LEAST = {"student.model": "s", "teacher.model": "t", "data.prompts": "/p.jsonl", "data.verifier": "exact"}


def entry(name: str) -> str:
    return dict(ENTRIES)[name]


def row(method: Method) -> str:
    return f"| {' | '.join([f'[{method.name}](#{method.name})', *method.axes.values()])} |"


def expanded(settings: dict[str, Any]) -> dict[str, Any]:
    return load_recipe(LEAST | settings).model_dump(exclude={"method"})


def test_one_entry_a_method_and_no_other() -> None:
    names = [name for name, _ in ENTRIES]
    assert sorted(names) == sorted(METHODS)


def test_one_row_a_method_and_no_other() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| [")]
    assert rows == [row(method) for method in METHODS.values()]


@pytest.mark.parametrize("name", METHODS)
def test_the_point_is_the_methods_point(name: str) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", entry(name), flags=re.DOTALL)
    assert len(blocks) == (2 if name == "grpo" else 1)  # its second is a term to add
    assert expanded(tomllib.loads(blocks[0])) == expanded({"method": name})


def test_the_kl_that_grpo_may_have_beside_it_is_a_term_that_loads() -> None:
    point, kl = (tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", entry("grpo"), flags=re.DOTALL))
    recipe = load_recipe(LEAST | point | {"terms": point["terms"] + kl["terms"]})
    assert [(term.teacher, term.coefficient, term.form) for term in recipe.terms] == [
        ("reward", 1.0, None),
        ("reference", 0.04, "k2"),
    ]
    with pytest.raises(LegalityError, match="k3-loss"):
        load_recipe(LEAST | point | {"terms": [*point["terms"], kl["terms"][0] | {"form": "k3"}]})


@pytest.mark.parametrize("name", METHODS)
def test_an_entry_has_its_parts(name: str) -> None:
    parts = dict(re.findall(r"^\*\*(\w+)\.\*\* (.*?)(?=\n\n|\Z)", entry(name), flags=re.MULTILINE | re.DOTALL))
    assert set(PARTS) <= parts.keys() <= {*PARTS, "Elsewhere"}
    assert " ".join(parts["Reference"].split()) == METHODS[name].source


def test_the_readme_names_every_method() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert [name for name in METHODS if f"`{name}`" not in readme] == []
