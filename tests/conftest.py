"""Every test starts from the same place: one thread, no hub, fixed seeds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported, so before any test module is
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

if TYPE_CHECKING:
    from etude.training.loop import Parts

torch.set_num_threads(1)  # the models are tiny, and bit-for-bit tests need one fixed count


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    torch.manual_seed(0)


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., Parts]:
    """`built("train.steps=2")`: the parts of `tiny_recipe` with these changes; its run's folder is not made."""
    from etude.config.load import load_recipe
    from etude.recipes.build import build
    from etude.runtime.tracking import Tracker
    from etude.runtime.world import World
    from etude.testing import tiny_recipe

    def make(*changes: str) -> Parts:
        recipe = load_recipe(tiny_recipe(tmp_path), list(changes))
        tracker = Tracker(None, console=False, total_steps=recipe.train.steps)
        return build(recipe, folder=Path(recipe.output), world=World(), tracker=tracker)

    return make
