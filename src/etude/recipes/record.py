"""Rollouts written once and marked once, to train from later without writing and without the teacher.

First the student as it begins writes every round, then it goes and the teacher comes and marks them, so that the two
are never in memory together. The folder serves as `sampler.recorded` and `teacher.scores`. Round r holds exactly the
rows that the same recipe, not recorded, would have its first student write in round r. `etude record` calls it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic

from etude.axes.names import TEACHER, Source
from etude.config.schema import Recipe
from etude.core.objective import Objective
from etude.core.records import Prompt, Rollout
from etude.errors import PairError, RecipeError
from etude.models.backbone import load_backbone
from etude.models.cache import CachedTeacher, ScoreStore
from etude.models.fingerprint import weights_hash
from etude.models.mixture import DatasetSampler
from etude.models.recorded import NAME, Recorder, Recording
from etude.models.sampling import InProcessSampler
from etude.recipes.build import (
    gives_of,
    load_student,
    load_teacher,
    num_parameters,
    objective_of,
    require_gives,
    sampling_settings,
)
from etude.recipes.data import Data, read_data
from etude.recipes.devices import Device, choose_device, choose_threads
from etude.recipes.folder import with_students_of_runs
from etude.recipes.stored import how_written, open_scores
from etude.recipes.teachers import require_teacher
from etude.runtime.lock import locked
from etude.runtime.progress import PLAIN_LINES, duration
from etude.runtime.seeds import Key
from etude.runtime.tracking import Tracker
from etude.runtime.world import World
from etude.training.stages import Plan


def record(recipe: Recipe, *, rounds: int | None = None, quiet: bool = False) -> Recording:
    """Write and mark the first rounds of a recipe, into the folder its `sampler.recorded` names.

    The same call again goes on where an earlier one was stopped, and with more rounds it adds to them.

    Args:
        recipe: names that folder; the teacher's scores go where its `teacher.scores` says.
        rounds: how many; None: all of the recipe's.
        quiet: print nothing.

    Raises:
        UsageError: something in recipe, data or models cannot be as asked, or another recording lies there.
        CheckpointError: what lies there is damaged.
    """
    folder = _folder(recipe, World.current())
    recipe, _ = with_students_of_runs(recipe)
    plan = Plan(recipe.train.steps, recipe.train.updates_per_round, recipe.train.epochs)
    count = len(list(plan.rounds(after=0))) if rounds is None else rounds
    if count < 1:
        raise RecipeError(f"--rounds {count} records nothing; write 1 or more")
    objective = objective_of(recipe)
    needs = objective.needs(TEACHER)
    _require_teacher(recipe, objective)
    device = choose_device(recipe, World())
    require_teacher(recipe, device)
    data = read_data(recipe)
    store = open_scores(recipe, TEACHER, needs, data, device)
    with locked(folder), Tracker(None, console=not quiet, total_steps=count) as tracker:
        recorder = Recorder(folder, _facts(recipe, data, device))
        tracker.say(data.describe())
        _write(recipe, recorder, data, device, count, tracker)
        if store is not None:
            _mark(recipe, recorder, store, data, device, count, tracker)
        recording = recorder.finish(count)
        tracker.say(f"recorded: {recording.describe()}")
        if store is not None:
            tracker.say(f"stored scores: {store.describe()}")
    return recording


def _folder(recipe: Recipe, world: World) -> Path:
    if recipe.stages is not None:
        raise RecipeError(
            "a recipe with stages has no one student that begins; record a recipe of the stage alone, with "
            "student.model = the student the stage before left"
        )
    if world.size > 1:
        raise RecipeError(f"recording is one process's work and there are {world.size}; start one")
    if recipe.sampler.recorded is None:
        raise RecipeError("sampler.recorded names no folder for the recording; write it, or use --output")
    return Path(recipe.sampler.recorded)


def _require_teacher(recipe: Recipe, objective: Objective) -> None:
    if not objective.needs(TEACHER):
        return
    if not recipe.has_teacher_model:
        raise PairError("scores cannot be made without a teacher; name its model in teacher.model")
    require_gives(objective, gives_of(recipe))


def _facts(recipe: Recipe, data: Data, device: Device) -> dict[str, object]:
    """How the rows are written and by whom: all that a row depends on."""
    config = recipe.student
    return {
        NAME: config.model,
        "student's weights": weights_hash(config.model),
        "student.keep_layers": None if config.keep_layers is None else list(config.keep_layers),
        "sampler.dtype": device.sampler_dtype,
        "seed": recipe.seed,
        "data": data.fingerprint,
        **how_written(recipe, data, sampling_settings(recipe, data.stop_ids)),
    }


def _prompts(recipe: Recipe, data: Data, number: int) -> list[Prompt]:
    return data.prompts_of_round(recipe, 0, number)


def _write(recipe: Recipe, recorder: Recorder, data: Data, device: Device, count: int, tracker: Tracker) -> None:
    """The student's rows of the rounds that are not there yet."""
    missing = [number for number in range(count) if not recorder.has(number)]
    if len(missing) < count:
        tracker.say(f"{count - len(missing)} of {count} rounds are there already")
    if not missing:
        return
    student = load_student(recipe, device)
    choose_threads(recipe.device.threads, num_parameters(student))
    settings = sampling_settings(recipe, data.stop_ids)
    sampler = InProcessSampler(
        student.backbone,
        settings,
        dtype=device.sampler_dtype,
        rows_per_batch=recipe.sampler.rows_per_batch,
        record_kept=objective_of(recipe).needs_kept_sets,
    )
    sampler.refresh(student, version=0)
    for number in _told(missing, "written", tracker):
        recorder.add(number, sampler.sample(_prompts(recipe, data, number), Key(recipe.seed, "sample", 0, number)))


def _mark(
    recipe: Recipe, recorder: Recorder, store: ScoreStore, data: Data, device: Device, count: int, tracker: Tracker
) -> None:
    """The teacher's scores of every row without one; and of the data's own rows, where the recipe mixes them in."""
    gc.collect()  # the student's modules hang together in circles; they must go before the teacher comes
    model = load_teacher(recipe, device, None, load_backbone)
    assert model is not None  # asked for before
    choose_threads(recipe.device.threads, num_parameters(model))
    teacher = CachedTeacher(model, store, name=TEACHER)
    objective = objective_of(recipe)
    for number in _told(range(count), "marked", tracker):
        rows: list[Rollout] = recorder.load(number)
        teacher.score(rows, objective.needs(TEACHER), objective.temperature)
        if Source.DATASET in recipe.sampler.writers:
            own = DatasetSampler().sample(_prompts(recipe, data, number), Key(recipe.seed, "sample", 0, number))
            teacher.score(own, objective.needs(TEACHER), objective.temperature)


def _told(numbers: Sequence[int], what: str, tracker: Tracker) -> Iterator[int]:
    """The numbers, with a line now and then on how many are done and how long the rest will take."""
    began, every = monotonic(), -(-len(numbers) // PLAIN_LINES)
    for place, number in enumerate(numbers, start=1):
        yield number
        if place % every == 0 or place == len(numbers):
            left = (monotonic() - began) / place * (len(numbers) - place)
            tracker.say(f"{what}: round {place}/{len(numbers)}" + (f"  {duration(left)} left" if left else ""))
