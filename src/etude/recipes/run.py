"""The Python door: `train(recipe)` does what `etude train` does.

A run is a folder: the expanded recipe, versions, metrics.jsonl, checkpoints, samples and summary.json. The same call
again goes on from the newest whole checkpoint; a finished run is only summarised. Changed settings are listed and
refused rather than mixed into one run. A recipe with stages is a run of each, one student going through them in turn.

    from etude import load_recipe, train
    summary = train(load_recipe("maze", ["train.steps=20"]))
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from etude import errors
from etude.config.schema import Recipe
from etude.errors import CheckpointError, EtudeError, RecipeError
from etude.preflight.findings import require
from etude.recipes.build import build, require_rows
from etude.recipes.check import named, require_readable, start_findings
from etude.recipes.folder import STAGE_FACT, SUMMARY_FILE, begin, require_places, write_json
from etude.recipes.pair import pair_findings
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
    stages: tuple[Summary, ...] = ()  # of a run with stages: each one's

    def as_json(self) -> dict[str, Any]:
        """What `summary.json` holds: no word of stages where there are none."""
        held = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "stages"}
        return held | ({"stages": [stage.as_json() for stage in self.stages]} if self.stages else {})


@dataclass(frozen=True, slots=True)
class _Stage:
    """Where in a run with stages a stage stands."""

    whole: Recipe
    place: int  # from 0
    start: Path | None  # the student of the stage before; None: the recipe's, as it is


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
                require_places(recipe, fresh)
                stack.enter_context(locked(folder))
        except EtudeError as error:
            refusal = error
        except OSError as error:
            refusal = RecipeError(f"the run's folder {folder} cannot be used: {error}; choose another output")
        _refuse_together(refusal, world)
        if recipe.stages is not None:
            return _run_stages(recipe, fresh, quiet, world)
        return _run(recipe, fresh, world, stack.enter_context(_tracker(recipe, quiet, world)))


def _tracker(recipe: Recipe, quiet: bool, world: World) -> Tracker:
    return Tracker(
        Path(recipe.output) if world.is_main else None,
        console=not quiet and world.is_main,
        total_steps=recipe.train.steps,
    )


def _refuse_together(refusal: EtudeError | None, world: World) -> None:
    """What the main process refuses, every process refuses, in the same words."""
    kind, text = world.broadcast_object(refusal and (type(refusal).__name__, str(refusal))) or (None, "")
    if refusal is not None:
        raise refusal
    if kind is not None:
        raise getattr(errors, kind)(text)


def _run_stages(recipe: Recipe, fresh: bool, quiet: bool, world: World) -> Summary:
    """A run of each stage in turn, each from the student of the one before."""
    stages = recipe.stage_recipes
    _require_later_stages(recipe, fresh, world)
    found: list[Summary] = []
    for place, stage in enumerate(stages):
        with named(recipe, place), _tracker(stage, quiet, world) as tracker:
            tracker.say(f"stage {place + 1} of {len(stages)}: {stage.output}")
            start = Path(found[-1].student) if found else None
            found.append(_run(stage, fresh, world, tracker, _Stage(recipe, place, start)))
        fresh = False  # the first stage has removed them all
        gc.collect()  # a stage's models hang together in circles; they must go before the next ones come
    seconds = sum(summary.seconds for summary in found)
    steps = sum(summary.steps for summary in found)
    summary = Summary(
        recipe.output, found[-1].student, steps, seconds, found[0].before, found[-1].after, stages=tuple(found)
    )
    if world.is_main:
        write_json(Path(recipe.output) / SUMMARY_FILE, summary.as_json())
    return summary


def _require_later_stages(recipe: Recipe, fresh: bool, world: World) -> None:
    """What would refuse a stage still to come had better do so now than hours later."""
    unfinished = [fresh or _last(stage) is None for stage in recipe.stage_recipes]
    for place, stage in enumerate(recipe.stage_recipes):
        if unfinished[place] and any(unfinished[:place]):
            with named(recipe, place):
                require_rows(stage, world)
                read = require_readable(stage, world)
                require(pair_findings(read.recipe, read.data), stage.preflight.allow)


def _run(recipe: Recipe, fresh: bool, world: World, tracker: Tracker, stage: _Stage | None = None) -> Summary:
    folder = Path(recipe.output)
    state = None if fresh else _finished(recipe)
    if state is None:
        place, start = (stage.place, stage.start) if stage else (0, None)
        parts = build(recipe, folder=folder, world=world, tracker=tracker, stage=place, start=start)
        if fresh or parts.saver.store.newest() is None:  # what goes on has been judged when it began
            require(start_findings(recipe, parts), recipe.preflight.allow)
        if world.is_main:
            facts = dict(parts.saver.info)
            if stage is not None:
                begin(Path(stage.whole.output), stage.whole, fresh, facts)
                facts[STAGE_FACT] = stage.place
            begin(folder, recipe, fresh, facts)
        world.barrier()
        state = _go_on(parts, start)
    student = CheckpointStore(folder / CHECKPOINTS_FOLDER).path_of(state.step) / STUDENT_FOLDER
    summary = Summary(str(folder), str(student), state.step, state.seconds, state.before, state.after)
    if world.is_main:
        write_json(folder / SUMMARY_FILE, summary.as_json())
    tracker.say(f"run {folder}: {state.step} steps taken; the student is {student}")
    return summary


def _last(recipe: Recipe) -> Path | None:
    """Where the last checkpoint of a run lies, whole or not; None if it is not there."""
    path = CheckpointStore(Path(recipe.output) / CHECKPOINTS_FOLDER).path_of(recipe.train.steps)
    return path if path.exists() else None


def _finished(recipe: Recipe) -> State | None:
    """The last state of a run that has taken all its steps, read without its models."""
    store = CheckpointStore(Path(recipe.output) / CHECKPOINTS_FOLDER)
    checkpoint = store.newest() if _last(recipe) else None
    return read_state(checkpoint) if checkpoint is not None and checkpoint.step == recipe.train.steps else None


def _go_on(parts: Parts, start: Path | None) -> State:
    started = time.monotonic()
    state = _restore(parts, parts.tracker, start)
    earlier = state.seconds
    parts.saver.clock = lambda: earlier + time.monotonic() - started
    try:
        state = run_loop(parts, state)
    except KeyboardInterrupt:
        checkpoint = parts.saver.store.newest()
        over = "starts over" if start is None else "starts this stage over"
        then = over if checkpoint is None else f"goes on from step {checkpoint.step}"
        raise KeyboardInterrupt(f"interrupted after step {state.step}; the same command {then}") from None
    state.seconds = parts.saver.clock()
    return state


def _restore(parts: Parts, tracker: Tracker, start: Path | None) -> State:
    """The state of the newest whole checkpoint, or a fresh one; says which damaged ones were passed over.

    A fresh one begins with the weights, or the adapters, of `start`, where there is one: taken in place, as a resume
    takes them, so that an adapter goes on being the same and a shortened student need not be shortened again.
    """
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
        if start is not None:
            parts.student.load(start)
        return State()
    if checkpoint.info.get("data") != parts.saver.info["data"]:
        raise CheckpointError(
            f"the prompts are not those the run in {parts.saver.folder} began with; "
            "bring those back (and its recording and stored scores, if it has any), start over with --fresh, or give "
            "this run another output"
        )
    before, now = (info.get("checkpoints", {}) for info in (checkpoint.info, parts.saver.info))
    if before != now:
        raise CheckpointError(
            f"{parts.saver.folder} began with other checkpoints as models ({_listed(before)} then, {_listed(now)} "
            "now); bring those back, name the step, start over with --fresh, or give this run another output"
        )
    threads = checkpoint.info["threads"]
    if threads != torch.get_num_threads():
        tracker.say(
            f"going on with {torch.get_num_threads()} threads a run that used {threads}: "
            "sums round differently, so the continuation is not bit-identical"
        )
    tracker.say(f"going on after step {checkpoint.step}")
    tracker.truncate_after(checkpoint.step)
    return parts.saver.restore(checkpoint, parts.student, parts.learner, parts.sampler, parts.teachers)


def _listed(checkpoints: Mapping[str, str]) -> str:
    return ", ".join(f"{role}: {place}" for role, place in checkpoints.items()) or "none"
