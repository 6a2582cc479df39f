"""A run's folder in the place of a model: the student of its newest checkpoint, or of the step that is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from etude.config.load import load_recipe
from etude.errors import CheckpointError, RecipeError
from etude.recipes.build import build
from etude.recipes.check import require_readable
from etude.recipes.folder import checkpoint_of, with_students_of_runs
from etude.recipes.run import train
from etude.runtime.tracking import Tracker
from etude.runtime.world import World
from etude.testing import tiny_recipe
from etude.training.loop import Parts

NEAR = {"name": "near", "teacher": "reference", "coefficient": 0.1}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of four steps whose checkpoints are all kept, and the settings it was made with."""
    settings = tiny_recipe(tmp_path_factory.mktemp("origin"))
    train(load_recipe(settings), quiet=True)
    return settings


@pytest.fixture
def run(origin: dict[str, Any], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(origin["output"], tmp_path / "origin"))


def made(settings: dict[str, Any], *changes: str) -> Parts:
    recipe = load_recipe(settings, changes)
    tracker = Tracker(None, console=False, total_steps=recipe.train.steps)
    return build(recipe, folder=Path(recipe.output), world=World(), tracker=tracker)


def same_weights(backbone: Any, run: Path, step: int) -> bool:
    saved = load_file(run / "checkpoints" / f"step-{step:06d}" / "student" / "model.safetensors")
    return all(backbone.base.state_dict()[name].equal(weight) for name, weight in saved.items())


def test_of_student_teacher_and_reference(origin: dict[str, Any], run: Path, tmp_path: Path) -> None:
    changes = [f"{role}.model={run}" for role in ("student", "teacher", "reference")]
    steps = ["teacher.step=1", "reference.step=3", f"output={tmp_path / 'run'}"]
    parts = made(origin | {"terms": [{}, NEAR]}, *changes, *steps)
    assert same_weights(parts.student.backbone, run, 4)  # the newest
    teachers: Any = parts.teachers
    assert same_weights(teachers["teacher"].backbone, run, 1)
    assert same_weights(teachers["reference"].backbone, run, 3)
    assert parts.saver.info["checkpoints"] == {
        "student": "checkpoints/step-000004",
        "teacher": "checkpoints/step-000001",
        "reference": "checkpoints/step-000003",
    }
    said = require_readable(load_recipe(origin | {"terms": [{}, NEAR]}, [*changes, *steps]), World()).said
    assert "teacher.model: checkpoints/step-000001" in said


def test_of_adapters_the_merged_student(origin: dict[str, Any], tmp_path: Path) -> None:
    lora = ["student.lora.rank=2", "student.lora.alpha=4", f"output={tmp_path / 'adapted'}", "train.steps=2"]
    train(load_recipe(origin, lora), quiet=True)
    teachers: Any = made(origin, f"teacher.model={tmp_path / 'adapted'}", f"output={tmp_path / 'run'}").teachers
    weights = teachers["teacher"].backbone.state_dict()
    assert not any(".lora_" in name for name in weights)
    own = load_file(Path(origin["student"]["model"]) / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not weights[f"model.{name}"].equal(own[name])


def test_of_a_run_with_stages_the_latest(origin: dict[str, Any], tmp_path: Path) -> None:
    stages = [{"name": "first", "train.steps": 2}, {"name": "second", "train.steps": 1}]
    output = str(tmp_path / "staged")
    train(load_recipe(origin | {"stages": stages, "output": output}), quiet=True)
    staged = Path(output)
    assert checkpoint_of(staged).path == staged / "2-second" / "checkpoints" / "step-000001"
    assert checkpoint_of(staged / "1-first").path == staged / "1-first" / "checkpoints" / "step-000002"
    assert checkpoint_of(staged / "1-first", 1).step == 1
    with pytest.raises(RecipeError, match=r"step 2 of the run .*2-second is not there .*it has those of steps 1, and"):
        checkpoint_of(staged, 2)
    shutil.rmtree(staged / "2-second" / "checkpoints")
    assert checkpoint_of(staged).path == staged / "1-first" / "checkpoints" / "step-000002"


def test_a_step_that_is_not_there_or_damaged(origin: dict[str, Any], run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-000002")
    damaged = run / "checkpoints" / "step-000004"
    (damaged / "optimizer.safetensors").write_bytes(b"")
    assert checkpoint_of(run).step == 3  # the newest whole one
    for step, sentence in [
        (
            2,
            r"step 2 of the run .*origin is not there \(manifest.json is missing\); it has those of steps 1, 3, 4, and",
        ),
        (
            4,
            r"step 4 of the run .* is damaged \(optimizer.safetensors has 0 bytes .*\); it has those of steps 1, 3, 4,",
        ),
    ]:
        with pytest.raises(RecipeError, match=sentence):
            checkpoint_of(run, step)
        with pytest.raises(RecipeError, match=sentence):
            require_readable(
                load_recipe(origin, [f"teacher.model={run}", f"teacher.step={step}", f"output={run / 'x'}"]), World()
            )


def test_no_whole_checkpoint_at_all(run: Path) -> None:
    for path in run.glob("checkpoints/step-*"):
        (path / "state.json").unlink()
    with pytest.raises(RecipeError, match=r"every checkpoint of the run .* is damaged \(step-000004: state.json is"):
        checkpoint_of(run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(RecipeError, match="has no whole checkpoint yet"):
        checkpoint_of(run)


def test_a_folder_that_is_no_run_stays_what_it_is(origin: dict[str, Any]) -> None:
    recipe = load_recipe(origin)
    assert with_students_of_runs(recipe) == (recipe, {})


def test_a_run_goes_on_with_the_checkpoint_it_began_with(origin: dict[str, Any], run: Path, tmp_path: Path) -> None:
    changes = [f"teacher.model={run}", f"output={tmp_path / 'run'}", "train.steps=2"]
    train(load_recipe(origin, changes), quiet=True)
    facts = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert facts["checkpoints"] == {"teacher": "checkpoints/step-000004"}
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")
    shutil.rmtree(run / "checkpoints" / "step-000004")
    sentence = r"with other checkpoints as models \(teacher: checkpoints/step-000004 then, .*step-000003 now\)"
    with pytest.raises(CheckpointError, match=sentence):
        train(load_recipe(origin, changes), quiet=True)
