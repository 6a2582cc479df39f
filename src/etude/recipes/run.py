"""The Python door: `train(recipe)` does what `etude train` does.

A run is a folder: the expanded recipe, versions, metrics.jsonl, checkpoints, samples and summary.json. The same call
again goes on from the newest whole checkpoint; a finished run is only summarised. Changed settings are listed and
refused rather than mixed into one run.

    from etude import load_recipe, train
    summary = train(load_recipe("maze", ["train.steps=20"]))
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from etude.config.load import dump_toml
from etude.config.schema import Recipe
from etude.errors import CheckpointError, RecipeError
from etude.recipes.build import build
from etude.runtime.tracking import Tracker
from etude.runtime.world import World
from etude.training.loop import Parts, train as run_loop
from etude.training.state import State

RECIPE_FILE, SUMMARY_FILE, VERSIONS_FILE = "recipe.toml", "summary.json", "versions.json"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a finished run leaves behind."""

    run: str  # the run's folder
    student: str  # the trained student: a folder transformers (or peft) loads
    steps: int  # optimiser steps
    seconds: float  # in all, over all sittings
    before: dict[str, float]  # held-out metrics before the first step
    after: dict[str, float]  # and after the last


def train(recipe: Recipe, *, fresh: bool = False, quiet: bool = False) -> Summary:
    """Train as the recipe says, or go on with a run that was started before.

    Args:
        recipe: from `etude.load_recipe`.
        fresh: remove an earlier run in the same folder first.
        quiet: print nothing.

    Raises:
        UsageError: something in recipe, data or models cannot be as asked; found before any step.
        RunError: the run met something it must not paper over.
    """
    world = World.current()
    folder = Path(recipe.output)
    try:
        if world.is_main:
            _open_run(folder, recipe, fresh)
        world.barrier()
        with Tracker(folder if world.is_main else None, console=not quiet and world.is_main, total_steps=recipe.train.steps) as tracker:
            return _run(recipe, folder, world, tracker)
    finally:
        world.close()


def _run(recipe: Recipe, folder: Path, world: World, tracker: Tracker) -> Summary:
    parts = build(recipe, folder=folder, world=world, tracker=tracker)
    started = time.monotonic()
    state = _restore(parts, tracker)
    earlier = state.seconds
    parts.saver.clock = lambda: earlier + time.monotonic() - started
    if state.step < parts.plan.steps:
        state = run_loop(parts, state)
    student = parts.saver.student_folder(state.step)
    summary = Summary(str(folder), str(student), state.step, parts.saver.clock(), state.before, state.after)
    if world.is_main:
        _write_json(folder / SUMMARY_FILE, asdict(summary))
    return summary


def _restore(parts: Parts, tracker: Tracker) -> State:
    """The state of the newest whole checkpoint, or a fresh one; says which damaged ones were passed over."""
    store = parts.saver.store
    checkpoint = store.newest()
    for path, reason in store.passed_over:
        tracker.say(f"passed over the checkpoint {path.name}: {reason}")
    if checkpoint is None:
        tracker.truncate_after(-1)
        return State()
    threads = checkpoint.info["threads"]
    if threads != torch.get_num_threads():
        tracker.say(
            f"going on with {torch.get_num_threads()} threads a run that used {threads}: "
            "sums round differently, so the continuation is not bit-identical"
        )
    tracker.say(f"going on after step {checkpoint.step}")
    tracker.truncate_after(checkpoint.step)
    return parts.saver.restore(checkpoint, parts.student, parts.learner)


def _open_run(folder: Path, recipe: Recipe, fresh: bool) -> None:
    """Make the run folder, or check that it belongs to this recipe."""
    text = dump_toml(recipe)
    written = folder / RECIPE_FILE
    if fresh and written.exists():
        shutil.rmtree(folder)
    if written.exists():
        changed = _changed_lines(written.read_text(encoding="utf-8"), text)
        if changed:
            raise CheckpointError(
                f"{folder} holds a run with other settings ({'; '.join(changed)}); "
                "start over with --fresh, or give this one another name or output"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise RecipeError(f"{folder} is not empty and holds no run; choose another output folder")
    folder.mkdir(parents=True, exist_ok=True)
    written.write_text(text, encoding="utf-8")
    _write_json(folder / VERSIONS_FILE, versions())


def _changed_lines(before: str, after: str) -> list[str]:
    import tomllib

    old, new = _flat(tomllib.loads(before)), _flat(tomllib.loads(after))
    keys = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
    return [f"{key}: {old.get(key, 'unset')} there, {new.get(key, 'unset')} now" for key in keys]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        items = enumerate(tree)
    else:
        return {prefix: tree}
    return {k: v for key, value in items for k, v in _flat(value, f"{prefix}.{key}".lstrip(".")).items()}


def versions() -> dict[str, str]:
    """What the run's numbers depend on besides the recipe."""
    names = ("etude", "torch", "transformers", "peft", "safetensors")
    found: dict[str, str] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"threads": str(torch.get_num_threads())}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
