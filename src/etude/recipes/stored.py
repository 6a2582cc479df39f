"""Whether what a recipe takes from disk fits it: recorded rollouts and stored scores, opened and compared.

`build.py` and `run.py` ask before any weight is loaded, `record.py` writes what is compared here.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from etude.axes.names import Gives
from etude.config.schema import Recipe
from etude.errors import PairError
from etude.models.cache import Origin, ScoreStore, kinds_of, nothing_stored
from etude.models.card import read_card
from etude.models.decoding import SamplingSettings
from etude.models.fingerprint import special_ids, vocabulary_hash, weights_hash
from etude.models.recorded import Recording
from etude.recipes.data import Data
from etude.recipes.devices import Device

SCORES_FOLDER = "scores"  # of a recording or any folder of stored scores; each teacher has a folder of its name there


def scores_folder(recipe: Recipe, teacher: str) -> Path | None:
    """Where the scores of the teacher of that name lie; None where it is asked each time."""
    if recipe.teacher is None or recipe.teacher.scores is None:
        return None
    return Path(recipe.teacher.scores) / SCORES_FOLDER / teacher


def stored_kinds(recipe: Recipe, teacher: str) -> frozenset[Gives]:
    """What a teacher without weights gives: what is stored of it.

    Raises:
        PairError: nothing is.
    """
    folder = scores_folder(recipe, teacher)
    return frozenset() if folder is None else kinds_of(folder)


def open_scores(recipe: Recipe, teacher: str, needs: frozenset[Gives], data: Data, device: Device) -> ScoreStore | None:
    """The store of a teacher's scores, where the recipe names one; it is of this teacher, or refused.

    Where the teacher's model is named, everything the scores depend on is compared; without it what the student knows.

    Raises:
        PairError: it is of another teacher, tokenizer, precision or temperature, or holds other kinds than are needed.
        CheckpointError: it is damaged.
    """
    folder = scores_folder(recipe, teacher)
    if folder is None or not needs:
        return None
    store = ScoreStore(folder, origin_of(recipe, data, device) if recipe.has_teacher_model else None)
    if not recipe.has_teacher_model and not store.kinds:
        raise nothing_stored(folder)
    store.require_kinds(needs)
    store.require(vocabulary=vocabulary_hash(data.tokenizer), temperature=recipe.loss.temperature)
    return store


def origin_of(recipe: Recipe, data: Data, device: Device) -> Origin:
    """What the scores of the recipe's teacher depend on."""
    config = recipe.teacher
    if config is None or config.model is None:
        raise PairError("scores cannot be made without a teacher; name its model in teacher.model")
    tokenizer = read_card(config.model, trust_remote_code=config.trust_remote_code).tokenizer
    return Origin(
        teacher=config.model,
        weights=weights_hash(config.model),
        vocabulary=vocabulary_hash(tokenizer),
        special_ids=special_ids(tokenizer),
        dtype=device.teacher_dtype
        if config.quantization == "none"
        else f"{device.teacher_dtype}, {config.quantization}",
        temperature=recipe.loss.temperature,
    )


def open_recording(recipe: Recipe, data: Data, settings: SamplingSettings) -> Recording | None:
    """The recording that the student's rows come from, where the recipe names one; made as the recipe says, or refused.

    Raises:
        RecipeError: there is none, or it was made with another tokenizer, other sampling or rows of another number.
        CheckpointError: it is damaged.
    """
    if recipe.sampler.recorded is None:
        return None
    recording = Recording(Path(recipe.sampler.recorded))
    recording.require(how_written(recipe, data, settings))
    return recording


def how_written(recipe: Recipe, data: Data, settings: SamplingSettings) -> dict[str, Any]:
    """What a recording and the run that reads it must have in common."""
    sampling = {f"sampler.{name}": value for name, value in settings.describe().items() if name != "stop_ids"}
    return {
        "tokenizer": vocabulary_hash(data.tokenizer),
        **sampling,
        "stop ids": list(settings.stop_ids),
        "rows": recipe.train.prompts_per_round * recipe.sampler.samples_per_prompt,
        "sampler.samples_per_prompt": recipe.sampler.samples_per_prompt,
    }


def fingerprint(data: Data, recording: Recording | None, scores: ScoreStore | None) -> str:
    """A hash of every id a run reads and of whose marks are taken from disk, so that a change of either is noticed."""
    if recording is None and scores is None:
        return data.fingerprint
    # Not of the scores themselves: others may be added while the run goes on.
    weights = None if scores is None or scores.origin is None else scores.origin.weights
    read = {"data": data.fingerprint, "rows": None if recording is None else recording.files, "weights": weights}
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()
