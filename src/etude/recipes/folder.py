"""The folder of a run: whose it is, what it must not be, and what is written there before the first step.

It holds the expanded recipe, versions, metrics.jsonl, checkpoints, samples and summary.json; where the recipe has
stages, recipe, versions and summary only, and a folder of the same kind for each stage. A folder of another run, of
other settings or of somebody's own files is refused, never mixed or overwritten. `run.py` calls it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from etude.config.load import dump_toml
from etude.config.plain import leaves
from etude.config.schema import Recipe
from etude.errors import CheckpointError, RecipeError
from etude.runtime.checkpoints import Checkpoint, CheckpointStore
from etude.runtime.tracking import METRICS_FILE
from etude.training.state import CHECKPOINTS_FOLDER, SAMPLES_FOLDER, STUDENT_FOLDER

RECIPE_FILE, SUMMARY_FILE, VERSIONS_FILE = "recipe.toml", "summary.json", "versions.json"
# Written first and removed last, so that the folder is known as ours however far writing or removing came.
MARK_FILE = VERSIONS_FILE
STAGE_FACT = "stage"  # in it, of a stage's folder: which stage, from 0
OWN_ENTRIES = (CHECKPOINTS_FOLDER, SAMPLES_FOLDER, METRICS_FILE, SUMMARY_FILE, RECIPE_FILE, MARK_FILE)


def require_places(recipe: Recipe, fresh: bool) -> None:
    """`require_place` for a run and each of its stages.

    A stage that has not begun may still be changed, left out or added, for nothing depends on it yet.

    Raises:
        UsageError, CheckpointError: as `require_place`, or stages have begun that are no longer the recipe's.
    """
    folder = Path(recipe.output)
    require_place(folder, recipe, fresh)
    stages = () if recipe.stages is None else recipe.stage_recipes
    if not fresh:
        _require_known_stages(folder, [stage.name for stage in stages])
    for place, stage in enumerate(stages):
        require_place(Path(stage.output), stage, fresh, place)
    if not fresh:
        _require_in_order(stages)


def require_place(folder: Path, recipe: Recipe, fresh: bool, stage: int | None = None) -> None:
    """Refuse a folder that is not a run's, or is another run's; nothing is written before the run can start."""
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"output = {folder} is a file; choose another folder")
    entries = {path.name for path in folder.glob("[!.]*")}
    if not entries <= {MARK_FILE} and not entries >= {MARK_FILE, RECIPE_FILE}:
        raise RecipeError(f"{folder} is not empty and holds no run; choose another output folder")
    if MARK_FILE in entries and (found := _stage_of(folder)) != stage:
        kind = "a run of its own" if found is None else f"a stage of the run in {folder.parent}"
        raise RecipeError(f"{folder} holds {kind}; go on with that one, or choose another output folder")
    if not fresh and _has_begun(folder):
        _require_same(folder, recipe)


def begin(folder: Path, recipe: Recipe, fresh: bool, facts: Mapping[str, Any]) -> None:
    """Make the run's folder what this run and those that go on with it expect."""
    names = {stage.name for stage in recipe.stage_recipes if recipe.stages is not None}
    for path in _stage_folders(folder):
        if fresh or path.name not in names:
            _clear(path)
    if fresh:
        _clear(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / VERSIONS_FILE, versions() | dict(facts))
    _write(folder / RECIPE_FILE, dump_toml(recipe))


def _clear(folder: Path) -> None:
    """Remove what is ours; the folder as well, if that was all and it is a stage's."""
    stage = _stage_of(folder)
    for name in OWN_ENTRIES:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if stage is not None and not any(folder.iterdir()):
        folder.rmdir()


def _has_begun(folder: Path) -> bool:
    return any((folder / name).exists() for name in (METRICS_FILE, CHECKPOINTS_FOLDER))


def _stage_of(folder: Path) -> int | None:
    """Which stage of the run around it a folder holds; None for a run of its own."""
    try:
        facts = json.loads((folder / MARK_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts.get(STAGE_FACT) if isinstance(facts, dict) else None


def _stage_folders(folder: Path) -> list[Path]:
    """Those of the stages that have begun, in their order."""
    stages = {mark.parent: _stage_of(mark.parent) for mark in folder.glob(f"*/{MARK_FILE}")}
    return sorted((path for path, place in stages.items() if place is not None), key=lambda path: stages[path] or 0)


def _require_known_stages(folder: Path, names: Sequence[str]) -> None:
    begun = [path.name for path in _stage_folders(folder) if _has_begun(path)]
    if not set(begun) <= set(names):
        there, now = ", ".join(begun), ", ".join(names) or "none"
        raise CheckpointError(
            f"{folder} holds a run with other stages ({there} begun there, {now} now); start over with --fresh, "
            "or give this one another name or output"
        )


def _require_in_order(stages: Sequence[Recipe]) -> None:
    """A stage that has begun needs no earlier one, but to train one of those anew would be a surprise."""
    for earlier, later in pairwise(stages):
        last = CheckpointStore(Path(earlier.output) / CHECKPOINTS_FOLDER).path_of(earlier.train.steps)
        if _has_begun(Path(later.output)) and not last.exists():
            raise CheckpointError(
                f"{later.output} has begun and {last}, from which it did, is gone; bring it back, or start over with "
                "--fresh"
            )


def _require_same(folder: Path, recipe: Recipe) -> None:
    """Refuse a run that was started with other settings, and list them."""
    try:
        changed = _changed_keys((folder / RECIPE_FILE).read_text(encoding="utf-8"), dump_toml(recipe))
    except ValueError as error:  # not TOML, not UTF-8
        raise CheckpointError(f"{folder / RECIPE_FILE} cannot be read: {error}; start over with --fresh") from None
    if changed:
        raise CheckpointError(
            f"{folder} holds a run with other settings ({'; '.join(changed.values())}); "
            f"start over with --fresh, or give this one another name or output{_way_to_more(folder, changed)}"
        )


def _way_to_more(folder: Path, changed: Iterable[str]) -> str:
    """What to do where only the number of steps is another, and perhaps what is measured and kept on the way."""
    keys = [key for key in changed if not key.startswith(("evaluation.", "checkpoint."))]
    checkpoint = CheckpointStore(folder / CHECKPOINTS_FOLDER).newest() if keys == ["train.steps"] else None
    if checkpoint is None:
        return ""
    return f"; to train further, start a new run with student.model={checkpoint.path / STUDENT_FOLDER}"


def _changed_keys(before: str, after: str) -> dict[str, str]:
    """By key, what it is there and what it is now."""
    old, new = (dict(leaves(tomllib.loads(text))) for text in (before, after))
    keys = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
    return {key: f"{key}: {old.get(key, 'unset')} there, {new.get(key, 'unset')} now" for key in keys}


def with_students_of_runs(recipe: Recipe) -> tuple[Recipe, dict[str, str]]:
    """The recipe with a checkpoint's student in the place of each run's folder, and by role which checkpoint that is.

    Raises:
        RecipeError: a run has no such checkpoint, or a step is asked of what is no run.
    """
    found: dict[str, str] = {}
    tables: dict[str, Any] = {}
    for role in ("student", "teacher", "reference"):
        config = getattr(recipe, role)
        if config is None or config.model is None:
            continue
        run = Path(config.model).expanduser()
        if not (run / MARK_FILE).is_file() or not (run / RECIPE_FILE).is_file():
            if config.step is not None:
                raise RecipeError(
                    f"{role}.step = {config.step} and {role}.model = {config.model} is no run; remove step"
                )
            continue
        checkpoint = checkpoint_of(run, config.step)
        found[role] = str(checkpoint.path.relative_to(run))
        tables[role] = config.model_copy(update={"model": str(checkpoint.path / STUDENT_FOLDER), "step": None})
    return recipe.model_copy(update=tables), found


def checkpoint_of(run: Path, step: int | None = None) -> Checkpoint:
    """The newest whole checkpoint of a run, of its latest stage that has any, or the one of a step there.

    Raises:
        RecipeError: there is none; says which steps there are.
    """
    folders = [*reversed(_stage_folders(run)), run]
    stores = [CheckpointStore(folder / CHECKPOINTS_FOLDER) for folder in folders]
    begun = [store for store in stores if store.steps]
    if not begun:
        raise RecipeError(f"the run {run} has no whole checkpoint yet; let the run reach one")
    if step is None:
        for store in begun:
            if checkpoint := store.newest():
                return checkpoint
        path, reason = begun[0].passed_over[0]
        raise RecipeError(
            f"every checkpoint of the run {run} is damaged ({path.name}: {reason}); bring back a copy of one"
        )
    try:
        return begun[0].at(step)
    except CheckpointError as error:
        steps = ", ".join(map(str, begun[0].steps))
        there = "is damaged" if step in begun[0].steps else "is not there"
        raise RecipeError(
            f"the checkpoint of step {step} of the run {begun[0].folder.parent} {there} ({error}); it has those of "
            f"steps {steps}, and checkpoint.keep says how many a run keeps"
        ) from None


def versions() -> dict[str, str]:
    """What the run's numbers depend on besides the recipe."""
    names = ("etude", "torch", "transformers", "peft", "safetensors")
    found: dict[str, str] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, value: object) -> None:
    """One JSON file, whole or not at all."""
    _write(path, json.dumps(value, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """The whole text or nothing, whenever the run is killed."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
