"""The Python door: `train(recipe)` does what `etude train` does.

A run is a folder: the expanded recipe, versions, metrics.jsonl, checkpoints, samples and summary.json. The same call
again goes on from the newest whole checkpoint; a finished run is only summarised. Changed settings are listed and
refused rather than mixed into one run.

    from etude import load_recipe, train
    summary = train(load_recipe("maze", ["train.steps=20"]))
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from etude import errors
from etude.config.load import load_recipe
from etude.config.schema import Recipe
from etude.errors import CheckpointError, EtudeError, RecipeError
from etude.models.backbone import load_backbone
from etude.models.lora import base_of
from etude.recipes.build import build, gives_of, objective_of, require_gives, sampling_settings
from etude.recipes.data import read_data
from etude.recipes.devices import choose_device
from etude.recipes.folder import RECIPE_FILE, SUMMARY_FILE, begin, require_place, write_json
from etude.runtime.checkpoints import CheckpointStore
from etude.runtime.lock import locked
from etude.runtime.tracking import Tracker
from etude.runtime.world import World
from etude.training.loop import Parts
from etude.training.loop import train as run_loop
from etude.training.state import CHECKPOINTS_FOLDER, STUDENT_FOLDER, State, read_state


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
    with ExitStack() as stack:
        refusal = None
        try:
            if world.is_main:
                require_place(folder, recipe, fresh)
                stack.enter_context(locked(folder))
        except EtudeError as error:
            refusal = error
        except OSError as error:
            refusal = RecipeError(f"the run's folder {folder} cannot be used: {error}; choose another output")
        _refuse_together(refusal, world)
        tracker = Tracker(
            folder if world.is_main else None, console=not quiet and world.is_main, total_steps=recipe.train.steps
        )
        return _run(recipe, folder, fresh, world, stack.enter_context(tracker))


def _refuse_together(refusal: EtudeError | None, world: World) -> None:
    """What the main process refuses, every process refuses, in the same words."""
    kind, text = world.broadcast_object(refusal and (type(refusal).__name__, str(refusal))) or (None, "")
    if refusal is not None:
        raise refusal
    if kind is not None:
        raise getattr(errors, kind)(text)


def _run(recipe: Recipe, folder: Path, fresh: bool, world: World, tracker: Tracker) -> Summary:
    state = None if fresh else _finished(folder, recipe.train.steps)
    if state is None:
        parts = build(recipe, folder=folder, world=world, tracker=tracker)
        if world.is_main:
            begin(folder, recipe, fresh, parts.saver.info)
        world.barrier()
        state = _go_on(parts)
    student = CheckpointStore(folder / CHECKPOINTS_FOLDER).path_of(state.step) / STUDENT_FOLDER
    summary = Summary(str(folder), str(student), state.step, state.seconds, state.before, state.after)
    if world.is_main:
        write_json(folder / SUMMARY_FILE, asdict(summary))
    tracker.say(f"run {folder}: {state.step} steps taken; the student is {student}")
    return summary


def _finished(folder: Path, steps: int) -> State | None:
    """The last state of a run that has taken all its steps, read without its models."""
    store = CheckpointStore(folder / CHECKPOINTS_FOLDER)
    checkpoint = store.newest() if store.path_of(steps).exists() else None
    return read_state(checkpoint) if checkpoint is not None and checkpoint.step == steps else None


def _go_on(parts: Parts) -> State:
    started = time.monotonic()
    state = _restore(parts, parts.tracker)
    earlier = state.seconds
    parts.saver.clock = lambda: earlier + time.monotonic() - started
    try:
        state = run_loop(parts, state)
    except KeyboardInterrupt:
        checkpoint = parts.saver.store.newest()
        then = "starts over" if checkpoint is None else f"goes on from step {checkpoint.step}"
        raise KeyboardInterrupt(f"interrupted after step {state.step}; the same command {then}") from None
    state.seconds = parts.saver.clock()
    return state


def _restore(parts: Parts, tracker: Tracker) -> State:
    """The state of the newest whole checkpoint, or a fresh one; says which damaged ones were passed over."""
    store = parts.saver.store
    checkpoint = store.newest()
    for path, reason in store.passed_over:
        tracker.say(f"passed over the checkpoint {path.name}: {reason}")
    if checkpoint is None:
        if store.passed_over:
            raise CheckpointError(
                f"every checkpoint in {store.folder} is damaged ({store.passed_over[0][1]}); bring back a copy of one, "
                "or start over with --fresh"
            )
        tracker.truncate_after(-1)
        return State()
    if checkpoint.info.get("data") != parts.saver.info["data"]:
        raise CheckpointError(
            f"the prompts are not those the run in {parts.saver.folder} began with; "
            "bring those back, start over with --fresh, or give this run another output"
        )
    threads = checkpoint.info["threads"]
    if threads != torch.get_num_threads():
        tracker.say(
            f"going on with {torch.get_num_threads()} threads a run that used {threads}: "
            "sums round differently, so the continuation is not bit-identical"
        )
    tracker.say(f"going on after step {checkpoint.step}")
    tracker.truncate_after(checkpoint.step)
    return parts.saver.restore(checkpoint, parts.student, parts.learner, parts.sampler)


def check(recipe: Recipe) -> str:
    """What can be found out before any weight is read: terms, device, folder, data, lengths. Returns what to print.

    Raises:
        UsageError: the run could not start; the sentence says why and what to do.
    """
    objective = objective_of(recipe)
    require_gives(objective, gives_of(recipe))
    choose_device(recipe, World())
    require_place(Path(recipe.output), recipe, fresh=False)
    data = read_data(recipe)
    lines = [
        f"{data.describe()}; the longest has {data.train.longest_prompt} tokens",
        f"sampling: {sampling_settings(recipe, data.stop_ids).describe()}",
        *objective.warnings,
        *data.warnings,
    ]
    return "\n".join(lines)


def export(run: Path, *, to: Path, merge: bool) -> str:
    """Write the newest student of a run as a folder of its own. Returns what to print.

    Args:
        run: the run's folder.
        to: where to write; must not exist yet.
        merge: fold LoRA adapters into the weights, for a plain folder; without it an adapter folder stays one.

    Raises:
        UsageError: no run there, no whole checkpoint in it, or something stands at `to`.
    """
    if not (run / RECIPE_FILE).is_file():
        raise RecipeError(f"{run} holds no run (no {RECIPE_FILE}); name the folder that etude train printed")
    if to.exists():
        raise RecipeError(f"{to} exists already; name another folder with --to")
    checkpoint = CheckpointStore(run / CHECKPOINTS_FOLDER).newest()
    if checkpoint is None:
        raise RecipeError(f"{run} has no whole checkpoint yet; let the run reach one")
    student = checkpoint.path / STUDENT_FOLDER
    adapters = base_of(str(student)) != str(student)
    if merge and adapters:
        config = load_recipe(run / RECIPE_FILE).student
        load_backbone(str(student), dtype=config.dtype, trust_remote_code=config.trust_remote_code).save(to)
    else:
        shutil.copytree(student, to)
    kind = "a plain folder" if merge or not adapters else "an adapter folder (--merge folds it into its base)"
    return f"wrote the student of step {checkpoint.step} to {to}, {kind}"
