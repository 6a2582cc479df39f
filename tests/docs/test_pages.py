"""What the pages show is so: snippets give the printed numbers, recipes load, commands and links exist."""

from __future__ import annotations

import doctest
import re
import tomllib
from pathlib import Path

import pytest

from etude.cli.main import VERBS
from etude.config.load import load_recipe

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("name", ["core.md", "pitfalls.md"])
def test_snippets_give_the_numbers_on_the_page(name: str) -> None:
    page = REPOSITORY / "docs" / name
    failures, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert tried > 10
    assert failures == 0, "see the captured output"


def test_the_recipe_in_the_readme_loads() -> None:
    recipes = blocks(REPOSITORY / "README.md", "toml")
    assert recipes
    for recipe in recipes:
        assert load_recipe(tomllib.loads(recipe)).terms


def test_the_stages_in_the_recipes_page_load() -> None:
    (stages,) = (block for block in blocks(REPOSITORY / "docs" / "recipes.md", "toml") if "[[stages]]" in block)
    recipe = load_recipe(tomllib.loads(blocks(REPOSITORY / "README.md", "toml")[0]) | tomllib.loads(stages))
    found = [(stage.name, stage.train.steps) for stage in recipe.stage_recipes]
    assert found == [("1-warm-up", 15), ("2-on-policy", 200)]


def test_the_teachers_on_their_page_load() -> None:
    found = [tomllib.loads(block) for block in blocks(REPOSITORY / "docs" / "teachers.md", "toml")]
    weights: list[str] = []
    for tables in found:
        student = {"model": "s"} | tables.get("student", {})
        teacher = load_recipe({"data": {"prompts": "p.jsonl"}} | tables | {"student": student}).teacher
        assert teacher is not None
        weights.append(teacher.weights)
    assert set(weights) == {"model", "base", "live", "ema", "my_package.teachers:Mine"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_commands_exist(page: Path) -> None:
    text = "\n".join(blocks(page, "bash")) + "\n".join(re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))
    for verb in re.findall(r"(?:^|[\s/])etude ([a-z]+)\b", text):
        assert verb in VERBS, f"etude {verb}"
    for target in re.findall(r"\bmake ([a-z][a-z0-9-]*)", text):
        assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE), f"make {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
