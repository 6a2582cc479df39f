"""A run's student as a folder of its own: a plain one for transformers, or an adapter folder for peft.

It reads a run's folder and no run; `etude export` calls it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from etude.config.load import load_recipe
from etude.errors import RecipeError
from etude.models.backbone import load_backbone
from etude.models.lora import base_of
from etude.recipes.folder import RECIPE_FILE, checkpoint_of
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
    checkpoint = checkpoint_of(run)
    stage = checkpoint.path.relative_to(run).parts[0]
    of = "" if stage == CHECKPOINTS_FOLDER else f" of stage {stage}"
    student = checkpoint.path / STUDENT_FOLDER
    adapters = base_of(str(student)) != str(student)
    if merge and adapters:
        config = recipe.student
        load_backbone(str(student), dtype=config.dtype, trust_remote_code=config.trust_remote_code).save(to)
    else:
        shutil.copytree(student, to)
    kind = "a plain folder" if merge or not adapters else "an adapter folder (--merge folds it into its base)"
    return f"wrote the student of step {checkpoint.step}{of} to {to}, {kind}"
