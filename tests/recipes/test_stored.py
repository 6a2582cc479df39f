"""Where stored scores lie, and what a run on them is known by; that a wrong store is refused, test_record.py shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.axes.names import Gives
from etude.config.load import load_recipe
from etude.errors import PairError
from etude.recipes.data import read_data
from etude.recipes.devices import choose_device
from etude.recipes.record import record
from etude.recipes.stored import fingerprint, open_scores, origin_of, scores_folder, stored_kinds
from etude.runtime.world import World
from etude.testing import tiny_recipe

SAMPLED = frozenset({Gives.SAMPLED_LOGPROBS})


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return tiny_recipe(tmp_path)


def test_each_teacher_has_a_folder_of_its_name(settings: dict[str, Any]) -> None:
    assert scores_folder(load_recipe(settings), "teacher") is None
    assert stored_kinds(load_recipe(settings), "teacher") == frozenset()
    assert scores_folder(load_recipe(settings, ["teacher.scores=s"]), "teacher") == Path("s/scores/teacher")


def test_no_store_is_opened_for_what_no_term_asks(settings: dict[str, Any], tmp_path: Path) -> None:
    recipe = load_recipe(settings, [f"teacher.scores={tmp_path}/s"])
    data, device = read_data(recipe), choose_device(recipe, World())
    assert open_scores(recipe, "teacher", frozenset(), data, device) is None
    store = open_scores(recipe, "teacher", SAMPLED, data, device)
    assert store is not None
    assert store.kinds == frozenset()


def test_what_scores_depend_on(settings: dict[str, Any]) -> None:
    recipe = load_recipe(settings, ["loss.temperature=2.0", "teacher.dtype=bfloat16"])
    origin = origin_of(recipe, read_data(recipe), choose_device(recipe, World()))
    assert (origin.teacher, origin.dtype, origin.temperature) == (settings["teacher"]["model"], "bfloat16", 2.0)
    alone = load_recipe(settings, ["teacher.scores=s", "teacher.model="])
    with pytest.raises(PairError, match="scores cannot be made without a teacher"):
        origin_of(alone, read_data(alone), choose_device(alone, World()))


def test_a_plain_run_is_known_by_its_data_and_a_recorded_one_by_its_rows_too(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    terms = {"support": "sampled", "estimator": "policy_gradient"}
    places = [f"sampler.recorded={tmp_path}/r", f"teacher.scores={tmp_path}/r"]
    recipe = load_recipe(settings | {"terms": [terms]}, places)
    data, device = read_data(recipe), choose_device(recipe, World())
    assert fingerprint(data, None, None) == data.fingerprint
    empty = open_scores(recipe, "teacher", SAMPLED, data, device)
    recording = record(recipe, quiet=True)
    full = open_scores(recipe, "teacher", SAMPLED, data, device)
    found = [fingerprint(data, r, s) for r, s in ((None, None), (recording, None), (None, full), (recording, full))]
    assert len(set(found)) == 4
    assert fingerprint(data, recording, empty) == found[3]  # more scores change nothing
