"""The folder of a run: whose it is, what it must not be, and what is written there before the first step.

It holds the expanded recipe, versions, metrics.jsonl, checkpoints, samples and summary.json. A folder of another
run, of other settings or of somebody's own files is refused, never mixed or overwritten. `run.py` calls it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from etude.config.load import dump_toml
from etude.config.plain import leaves
from etude.config.schema import Recipe
from etude.errors import CheckpointError, RecipeError
from etude.runtime.checkpoints import CheckpointStore
from etude.runtime.tracking import METRICS_FILE
from etude.training.state import CHECKPOINTS_FOLDER, SAMPLES_FOLDER, STUDENT_FOLDER

RECIPE_FILE, SUMMARY_FILE, VERSIONS_FILE = "recipe.toml", "summary.json", "versions.json"
# Written first and removed last, so that the folder is known as ours however far writing or removing came.
MARK_FILE = VERSIONS_FILE
OWN_ENTRIES = (CHECKPOINTS_FOLDER, SAMPLES_FOLDER, METRICS_FILE, SUMMARY_FILE, RECIPE_FILE, MARK_FILE)


def require_place(folder: Path, recipe: Recipe, fresh: bool) -> None:
    """Refuse a folder that is not a run's, or is another run's; nothing is written before the run can start."""
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"output = {folder} is a file; choose another folder")
    entries = {path.name for path in folder.glob("[!.]*")}
    if not entries <= {MARK_FILE} and not entries >= {MARK_FILE, RECIPE_FILE}:
        raise RecipeError(f"{folder} is not empty and holds no run; choose another output folder")
    if not fresh and entries & {METRICS_FILE, CHECKPOINTS_FOLDER}:
        _require_same(folder, recipe)


def begin(folder: Path, recipe: Recipe, fresh: bool, facts: Mapping[str, Any]) -> None:
    """Make the run's folder what this run and those that go on with it expect."""
    for name in OWN_ENTRIES if fresh else ():
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / VERSIONS_FILE, versions() | dict(facts))
    _write(folder / RECIPE_FILE, dump_toml(recipe))


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
