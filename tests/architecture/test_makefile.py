"""What the Makefile, the README and the docs tell a person to type is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
TARGETS = {
    "help",
    "quickstart",
    "quickstart-seeds",
    "quickstart-tune",
    "when-it-helps",
    "methods-table",
    "against-rl",
    "estimator-bias",
    "maze-models",
    "smollm2-controls",
    "legality-page",
    "test",
    "lint",
    "bench",
    "bench-cpu",
    "bench-estimates",
    "clean",
}


def test_the_targets() -> None:
    documented = set(re.findall(r"^([a-z0-9-]+):.*## \S", MAKEFILE, flags=re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert phony is not None
    assert documented == set(phony.group(1).split()) == TARGETS


@pytest.mark.parametrize("name", re.findall(r"etude experiment ([a-z0-9-]+)", MAKEFILE))
def test_its_experiments_are_there(name: str) -> None:
    module = REPOSITORY / "src" / "etude" / "experiments" / f"{name.replace('-', '_')}.py"
    assert "\ndef main(" in module.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", re.findall(r"(?:benchmarks|src|tests)/\S+\.py", MAKEFILE))
def test_its_scripts_are_there(path: str) -> None:
    assert (REPOSITORY / path).is_file()


def test_no_page_names_a_target_that_is_not() -> None:
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    named = {
        target
        for page in pages
        for target in re.findall(r"(?:^|`)\s*make ([a-z0-9-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert named <= TARGETS
