"""A run's student as a folder of its own: a plain one for transformers, or an adapter folder for peft.

It reads a run's folder and no run; `etude export` calls it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from etude.config.load import load_recipe
from etude.errors import RecipeError
from etude.models.backbone import load_backbone
from etude.models.lora import base_of
from etude.recipes.folder import RECIPE_FILE
from etude.runtime.checkpoints import Checkpoint, CheckpointStore
from etude.training.state import CHECKPOINTS_FOLDER, STUDENT_FOLDER


def export(run: Path, *, to: Path, merge: bool) -> str:
    """Write the newest student of a run, of its latest stage if it has any, as a folder of its own.

    Args:
        run: the run's folder, or a stage's.
        to: where to write; must not exist yet.
        merge: fold LoRA adapters into the weights, for a plain folder; without it an adapter folder stays one.

    Returns:
        What to print.

    Raises:
        UsageError: no run there, no whole checkpoint in it, or something stands at `to`.
    """
    if not (run / RECIPE_FILE).is_file():
        raise RecipeError(f"{run} holds no run (no {RECIPE_FILE}); name the folder that etude train printed")
    if to.exists():
        raise RecipeError(f"{to} exists already; name another folder with --to")
    recipe = load_recipe(run / RECIPE_FILE)
    found = _newest(run, [stage.name for stage in recipe.stage_recipes if recipe.stages is not None])
    if found is None:
        raise RecipeError(f"{run} has no whole checkpoint yet; let the run reach one")
    checkpoint, of = found
    student = checkpoint.path / STUDENT_FOLDER
    adapters = base_of(str(student)) != str(student)
    if merge and adapters:
        config = recipe.student
        load_backbone(str(student), dtype=config.dtype, trust_remote_code=config.trust_remote_code).save(to)
    else:
        shutil.copytree(student, to)
    kind = "a plain folder" if merge or not adapters else "an adapter folder (--merge folds it into its base)"
    return f"wrote the student of step {checkpoint.step}{of} to {to}, {kind}"


def _newest(run: Path, stages: Sequence[str]) -> tuple[Checkpoint, str] | None:
    """The newest whole checkpoint of a run, of the latest stage that has one, and which stage that is, in words."""
    places = [(run / name, f" of stage {name}") for name in reversed(stages)] or [(run, "")]
    for folder, of in places:
        if checkpoint := CheckpointStore(folder / CHECKPOINTS_FOLDER).newest():
            return checkpoint, of
    return None
