"""A run with stages: what each begins with and draws, what is refused, and that a resume in any changes nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.torch import load_file
from torch import Tensor

from etude.cli.main import main
from etude.config.load import dump_toml, load_recipe
from etude.config.schema import Recipe
from etude.core.records import Prompt, Rollout, Scored
from etude.errors import CheckpointError, DataError, RecipeError
from etude.models.sampling import InProcessSampler
from etude.recipes.check import check
from etude.recipes.export import export
from etude.recipes.run import Summary, train
from etude.runtime.seeds import Key
from etude.runtime.tracking import read_metrics
from etude.testing import tiny_recipe
from etude.training.learner import Learner, StepReport
from etude.training.loop import Parts
from etude.training.state import State

STAGES = [
    {"name": "warm-up", "method": "supervised-kd", "train": {"steps": 3}, "optim": {"warmup_steps": 2}},
    {"name": "on-policy", "method": "opd", "train": {"updates_per_round": 2}},
]
FOLDERS = ("1-warm-up", "2-on-policy")
LAST = (3, 4)  # steps of each stage
VARIANTS: dict[str, list[str]] = {
    "all weights": [],
    "an adapter, dropout": ["student.lora={rank=2, alpha=4, dropout=0.1}", "student.dropout=true"],
    "a shortened student": ["student.keep_layers=[0, 2]"],
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Summary]:
    """A run of both stages that was never interrupted."""
    settings = tiny_recipe(tmp_path_factory.mktemp("whole"), layers=3) | {"stages": STAGES}
    recipe = load_recipe(settings, VARIANTS[request.param])
    return recipe, train(recipe, quiet=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Summary]:
    """The first of them, for tests that do not ask about adapters and layers."""
    recipe = load_recipe(tiny_recipe(tmp_path_factory.mktemp("plain")) | {"stages": STAGES})
    return recipe, train(recipe, quiet=True)


@pytest.fixture
def no_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr("etude.recipes.build.load_backbone", fail)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Parts, dict[str, Tensor], int]]:
    """Of each stage the parts, the trainable weights before its first step, and how many tensors its optimiser held."""
    from etude.recipes import run

    noted: list[tuple[Parts, dict[str, Tensor], int]] = []
    real = run.run_loop

    def loop(parts: Parts, state: State) -> State:
        weights = {name: weight.detach().clone() for name, weight in parts.student.trainable_parameters().items()}
        noted.append((parts, weights, len(parts.learner.optimizer.state)))
        return real(parts, state)

    monkeypatch.setattr(run, "run_loop", loop)
    return noted


def moved(recipe: Recipe, folder: Path) -> Recipe:
    return recipe.model_copy(update={"output": str(folder)})


def copied(recipe: Recipe, folder: Path) -> Recipe:
    """The run in another place."""
    shutil.copytree(recipe.output, folder)
    there = moved(recipe, folder)
    for part in (there, *there.stage_recipes):
        (Path(part.output) / "recipe.toml").write_text(dump_toml(part), encoding="utf-8")
    return there


def with_stages(recipe: Recipe, folder: Path, *changes: str) -> Recipe:
    """The recipe as it was dumped, with changes."""
    (folder.parent / "changed.toml").write_text(dump_toml(moved(recipe, folder)), encoding="utf-8")
    return load_recipe(folder.parent / "changed.toml", changes)


def traces(folder: Path) -> dict[str, Any]:
    """All that a stage leaves behind, times aside."""
    last = max((folder / "checkpoints").iterdir())
    hashed = [*last.rglob("*.safetensors"), *(folder / "samples").iterdir()]
    assert len(hashed) == 4  # student, optimiser, answers before and after
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in hashed} | {
        "metrics": [
            {key: value for key, value in line.items() if key != "tokens/per_second" and not key.startswith("time/")}
            for line in lines
        ]
    }


def kill(monkeypatch: pytest.MonkeyPatch, stage: int, step: int) -> None:
    """Interrupt the run before that step of that stage; the step is in its round's second half where it is odd."""
    real = Learner._step  # pyright: ignore[reportPrivateUsage]

    def stepping(self: Learner, rows: Sequence[Scored], number: int, spare: Scored) -> StepReport:
        if (self.plan.stage, number) == (stage, step):
            raise KeyboardInterrupt(f"interrupted after step {step}")
        return real(self, rows, number, spare)

    monkeypatch.setattr(Learner, "_step", stepping)


# what a run with stages is --------------------------------------------------------------------------------------------


def test_the_folders(plain: tuple[Recipe, Summary]) -> None:
    recipe, _ = plain
    folder = Path(recipe.output)
    assert {path.name for path in folder.iterdir()} == {"recipe.toml", "versions.json", "summary.json", *FOLDERS}
    assert load_recipe(folder / "recipe.toml") == recipe
    for stage, name, steps in zip(recipe.stage_recipes, FOLDERS, LAST, strict=True):
        inner = {"recipe.toml", "versions.json", "summary.json", "metrics.jsonl", "checkpoints", "samples"}
        assert {path.name for path in (folder / name).iterdir()} == inner
        assert load_recipe(folder / name / "recipe.toml") == stage
        assert read_metrics(folder / name / "metrics.jsonl")[-1]["step"] == steps


def test_the_summary_is_of_the_whole_and_of_each(plain: tuple[Recipe, Summary]) -> None:
    recipe, summary = plain
    folder = Path(recipe.output)
    first, second = summary.stages
    assert [stage.run for stage in summary.stages] == [str(folder / name) for name in FOLDERS]
    assert (first.steps, second.steps, summary.steps) == (*LAST, sum(LAST))
    assert (summary.before, summary.after, summary.student) == (first.before, second.after, second.student)
    assert summary.seconds == first.seconds + second.seconds
    assert first.before != first.after == second.before != second.after
    written = json.loads((folder / "summary.json").read_text())
    assert tuple(Summary(**stage) for stage in written["stages"]) == summary.stages
    assert Summary(**written | {"stages": summary.stages}) == summary
    assert Summary(**json.loads((folder / FOLDERS[0] / "summary.json").read_text())) == first


def test_a_stage_begins_with_the_student_before_it_and_a_fresh_optimiser(
    whole: tuple[Recipe, Summary], tmp_path: Path, seen: list[tuple[Parts, dict[str, Tensor], int]]
) -> None:
    recipe, summary = whole
    train(moved(recipe, tmp_path / "run"), quiet=True)
    (_, fresh, _), (_, begun, held) = seen
    assert held == 0
    ended = [
        value for path in Path(summary.stages[0].student).glob("*.safetensors") for value in load_file(path).values()
    ]
    for name, weight in begun.items():
        assert any(weight.shape == value.shape and weight.equal(value) for value in ended), name
    assert any(not weight.equal(fresh[name]) for name, weight in begun.items())
    assert summary.stages[0].after == summary.stages[1].before  # the same student, prompts and random numbers
    rates = [
        [line["learning_rate"] for line in read_metrics(Path(stage.run) / "metrics.jsonl") if "learning_rate" in line]
        for stage in summary.stages
    ]
    # 0.01 at the peak and a tenth of it at the last step; the first stage reaches it in two steps, the second at once
    assert rates[0] == pytest.approx([0.005, 0.01, 0.001])
    assert rates[1] == pytest.approx([0.01, 0.007, 0.004, 0.001])


def test_an_adapter_goes_on_as_the_same_adapter_of_the_same_base(tmp_path: Path) -> None:
    settings = tiny_recipe(tmp_path) | {"stages": STAGES}
    summary = train(load_recipe(settings, VARIANTS["an adapter, dropout"]), quiet=True)
    configs = [json.loads((Path(stage.student) / "adapter_config.json").read_text()) for stage in summary.stages]
    assert [config["base_model_name_or_path"] for config in configs] == [settings["student"]["model"]] * 2
    adapters = [load_file(Path(stage.student) / "adapter_model.safetensors") for stage in summary.stages]
    assert adapters[0].keys() == adapters[1].keys()
    export(Path(summary.run), to=tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


NEAR = [{}, {"name": "near", "teacher": "reference", "coefficient": 0.5}]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_is_the_student_as_the_stage_begins(
    tmp_path: Path, seen: list[tuple[Parts, dict[str, Tensor], int]], variant: str
) -> None:
    """Nothing separates the two in a stage's first step; and killed inside of it, it is held to the same one again."""
    settings = tiny_recipe(tmp_path, layers=3) | {"stages": [STAGES[0], STAGES[1] | {"terms": NEAR}]}
    # Without the dropout, which would tell the student from its copy.
    changes = ["student.lora={rank=2, alpha=4}"] if "adapter" in variant else VARIANTS[variant]
    recipe = load_recipe(settings, changes)
    train(recipe, quiet=True)
    (first, _, _), (second, begun, _) = seen
    assert set(first.teachers) == {"teacher"}
    reference: Any = second.teachers["reference"]
    held = dict(reference.backbone.named_parameters())
    assert held.keys() == dict(second.student.backbone.named_parameters()).keys()
    assert not any(weight.requires_grad for weight in held.values())
    for name, weight in begun.items():
        assert held[name].equal(weight), name
        assert held[name].data_ptr() != second.student.trainable_parameters()[name].data_ptr()
    near = [line["divergence/near"] for line in read_metrics(Path(second.saver.folder) / "metrics.jsonl")[1:-1]]
    assert abs(near[0]) < 1e-6 < 1e-5 < near[2]

    again = moved(recipe, tmp_path / "again")
    with pytest.MonkeyPatch.context() as patched:
        kill(patched, 1, 3)
        with pytest.raises(KeyboardInterrupt):
            train(again, quiet=True)
    train(again, quiet=True)
    for name, weight in dict(cast(Any, seen[-1][0].teachers["reference"]).backbone.named_parameters()).items():
        assert held[name].equal(weight), name
    assert traces(Path(again.output) / FOLDERS[1]) == traces(Path(recipe.output) / FOLDERS[1])


def test_a_reference_that_is_named_is_that_one_in_every_stage(
    tmp_path: Path, seen: list[tuple[Parts, dict[str, Tensor], int]]
) -> None:
    settings = tiny_recipe(tmp_path) | {"stages": [{"terms": NEAR}, {"terms": NEAR}]}
    named = f"reference.model={settings['teacher']['model']}"
    train(load_recipe(settings, ["train.steps=1", named]), quiet=True)
    for parts, _, _ in seen:
        theirs, ours = (
            dict(cast(Any, parts.teachers[name]).backbone.named_parameters()) for name in ("teacher", "reference")
        )
        assert all(ours[name].equal(weight) for name, weight in theirs.items())


def test_layers_are_left_out_once(tmp_path: Path) -> None:
    settings = tiny_recipe(tmp_path, layers=3) | {"stages": STAGES}
    summary = train(load_recipe(settings, VARIANTS["a shortened student"]), quiet=True)
    counts = [json.loads((Path(s.student) / "config.json").read_text())["num_hidden_layers"] for s in summary.stages]
    assert counts == [2, 2]


def test_stages_draw_different_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal stages at a rate that leaves the weights alone: other orders of prompts, other answers to the same."""
    written: list[tuple[int, dict[str, list[int]]]] = []
    real = InProcessSampler.sample

    def sample(self: InProcessSampler, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        rollouts = real(self, prompts, key)
        if key.purpose == "sample":
            written.append((key.stage, {str(r.prompt.token_ids.tolist()): r.completion_ids.tolist() for r in rollouts}))
        return rollouts

    monkeypatch.setattr(InProcessSampler, "sample", sample)
    settings = tiny_recipe(tmp_path) | {"stages": [{}, {}]}
    train(load_recipe(settings, ["optim.learning_rate=1e-30", "train.prompts_per_round=20"]), quiet=True)
    assert [stage for stage, _ in written] == [0] * 4 + [1] * 4
    first, second = written[0][1], written[4][1]
    assert first.keys() == second.keys()  # 20 prompts a round are all of them
    assert list(first) != list(second)
    assert sum(first[prompt] != second[prompt] for prompt in first) > 10


def test_the_first_stage_is_bit_for_bit_the_run_that_it_would_be_alone(
    plain: tuple[Recipe, Summary], tmp_path: Path
) -> None:
    recipe, summary = plain
    train(recipe.stage_recipes[0].model_copy(update={"output": str(tmp_path / "run")}), quiet=True)
    assert traces(tmp_path / "run") == traces(Path(summary.stages[0].run))


# going on -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "step"), [(0, 0), (0, 2), (1, 0), (1, 1)])
def test_a_run_killed_in_any_stage_goes_on_bit_for_bit(
    whole: tuple[Recipe, Summary], tmp_path: Path, stage: int, step: int
) -> None:
    recipe, summary = whole
    again = moved(recipe, tmp_path / "run")
    with pytest.MonkeyPatch.context() as patched:
        kill(patched, stage, step)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            train(again, quiet=True)
    then = f"goes on from step {step}" if step else ("starts over", "starts this stage over")[stage]
    name = FOLDERS[stage][2:]
    assert str(interrupted.value) == (
        f'stages.{stage} ("{name}"): interrupted after step {step}; the same command {then}'
    )
    assert not (tmp_path / "run" / "summary.json").exists()
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / FOLDERS[0] / "checkpoints").rglob("*")}
    found = train(again, quiet=True)
    for name in FOLDERS:
        assert traces(tmp_path / "run" / name) == traces(Path(recipe.output) / name), name
    assert (found.before, found.after, found.steps) == (summary.before, summary.after, summary.steps)
    if stage == 1:  # a finished stage is only read
        assert {path: path.stat().st_mtime_ns for path in done} == done


def test_a_finished_run_is_only_summarised(
    plain: tuple[Recipe, Summary], tmp_path: Path, no_model_loads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = copied(plain[0], tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    summary = train(recipe)
    said = capsys.readouterr().err
    assert f"stage 1 of 2: {tmp_path / 'run' / FOLDERS[0]}\n" in said
    assert f"stage 2 of 2: {tmp_path / 'run' / FOLDERS[1]}\n" in said
    assert (summary.before, summary.after, summary.steps) == (plain[1].before, plain[1].after, plain[1].steps)
    assert train(recipe, quiet=True) == summary
    assert capsys.readouterr() == ("", "")


def test_fresh_starts_all_stages_over_and_leaves_what_is_not_ours(
    plain: tuple[Recipe, Summary], tmp_path: Path
) -> None:
    copied(plain[0], tmp_path / "run")
    for folder in (tmp_path / "run", tmp_path / "run" / FOLDERS[0]):
        (folder / "notes.txt").write_text("mine")
    shorter = with_stages(plain[0], tmp_path / "run", "stages.0.name=first", "stages.0.train.steps=1", "seed=1")
    assert train(shorter, fresh=True, quiet=True).steps == 1 + LAST[1]
    names = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
    assert names == {"1-first", FOLDERS[0], FOLDERS[1]}
    assert [path.name for path in (tmp_path / "run" / FOLDERS[0]).iterdir()] == ["notes.txt"]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    alone = load_recipe(tiny_recipe(tmp_path / "other"), [f"output={tmp_path / 'run'}", "train.steps=1"])
    train(alone, fresh=True, quiet=True)
    assert not (tmp_path / "run" / "1-first").exists()


# what is refused ------------------------------------------------------------------------------------------------------


@pytest.fixture
def half(plain: tuple[Recipe, Summary], tmp_path: Path) -> Recipe:
    """The run as it is when the first stage has ended and the second has not begun."""
    recipe = copied(plain[0], tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / FOLDERS[1])
    return recipe


def test_a_stage_that_has_begun_keeps_its_settings(
    plain: tuple[Recipe, Summary], half: Recipe, no_model_loads: None
) -> None:
    folder = Path(half.output)
    for change, told in (
        ("stages.0.optim.learning_rate=0.5", "optim.learning_rate: 0.01 there, 0.5 now"),
        ("student.dropout=true", "student.dropout: False there, True now"),
    ):
        with pytest.raises(CheckpointError) as refused:
            train(with_stages(half, folder, change), quiet=True)
        assert str(refused.value).startswith(f"{folder / FOLDERS[0]} holds a run with other settings ({told}); start")


def test_a_stage_that_has_not_begun_may_be_changed_and_others_added(half: Recipe) -> None:
    """The first stage knows nothing of them: what follows is what would have followed at once."""
    folder = Path(half.output)
    changes = ["stages.1.name=later", "stages.1.train.steps=2", "stages.2.method=gkd", "stages.2.train.steps=1"]
    changed = with_stages(half, folder, *changes)
    before = traces(folder / FOLDERS[0])
    found = train(changed, quiet=True)
    assert [stage.steps for stage in found.stages] == [3, 2, 1]
    assert traces(folder / FOLDERS[0]) == before
    assert load_recipe(folder / "recipe.toml") == changed
    whole = moved(changed, folder.parent / "at once")
    train(whole, quiet=True)
    for stage in changed.stage_recipes:
        assert traces(folder / stage.name) == traces(Path(whole.output) / stage.name)


def test_a_stage_renamed_before_its_first_step_leaves_no_folder_behind(
    half: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(half.output)

    def out_of_memory(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("etude.recipes.run.run_loop", out_of_memory)
        with pytest.raises(MemoryError):
            train(half, quiet=True)
    assert (folder / FOLDERS[1]).exists()
    train(with_stages(half, folder, "stages.1.name=later"), quiet=True)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {FOLDERS[0], "2-later"}


@pytest.mark.parametrize("change", ["stages.0.name=other", "stages="])
def test_stages_that_have_begun_may_not_go(
    plain: tuple[Recipe, Summary], half: Recipe, change: str, no_model_loads: None
) -> None:
    now = "1-other, 2-on-policy" if "other" in change else "none"
    with pytest.raises(CheckpointError) as refused:
        train(with_stages(half, Path(half.output), change), quiet=True)
    assert f"holds a run with other stages (1-warm-up begun there, {now} now); start over" in str(refused.value)


def test_stages_are_not_put_into_a_run_without_them(tmp_path: Path) -> None:
    settings = tiny_recipe(tmp_path)
    train(load_recipe(settings, ["train.steps=1"]), quiet=True)
    with pytest.raises(
        CheckpointError, match=r"holds a run with other settings \(stages.0.checkpoint.every: unset there"
    ):
        train(load_recipe(settings | {"stages": STAGES}, ["train.steps=1"]), quiet=True)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_stage_is_not_trained_by_itself(half: Recipe, fresh: bool, no_model_loads: None) -> None:
    folder = Path(half.output) / FOLDERS[0]
    with pytest.raises(RecipeError, match=r"1-warm-up holds a stage of the run in .*run; go on with that one"):
        train(load_recipe(folder / "recipe.toml"), fresh=fresh, quiet=True)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_of_somebodys_where_a_stage_would_go(half: Recipe, fresh: bool, no_model_loads: None) -> None:
    folder = Path(half.output) / FOLDERS[1]
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RecipeError, match=r"2-on-policy is not empty and holds no run"):
        train(half, fresh=fresh, quiet=True)
    (folder / "notes.txt").unlink()
    shutil.copytree(Path(half.output) / FOLDERS[0], folder, dirs_exist_ok=True)
    (folder / "versions.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"2-on-policy holds a run of its own; go on with that one"):
        train(half, fresh=fresh, quiet=True)


def test_an_earlier_stage_is_not_trained_anew_unasked(
    plain: tuple[Recipe, Summary], tmp_path: Path, no_model_loads: None
) -> None:
    recipe = copied(plain[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / FOLDERS[0] / "checkpoints" / "step-000003")
    with pytest.raises(
        CheckpointError, match=r"2-on-policy has begun and .*1-warm-up.*step-000003.* is gone; bring it"
    ):
        train(recipe, quiet=True)


def test_what_a_later_stage_is_refused_for_is_told_before_the_first(tmp_path: Path, no_model_loads: None) -> None:
    recipe = load_recipe(tiny_recipe(tmp_path) | {"stages": STAGES}, ["stages.1.data.prompts=nowhere.jsonl"])
    with pytest.raises(DataError, match=r'^stages.1 \("on-policy"\): .*nowhere.jsonl'):
        train(recipe, quiet=True)
    assert not (tmp_path / "run").exists()


# the verbs ------------------------------------------------------------------------------------------------------------


def test_check_speaks_of_each_stage(tmp_path: Path) -> None:
    checked = check(load_recipe(tiny_recipe(tmp_path) | {"stages": STAGES}, ["stages.1.data.prompts=nowhere.jsonl"]))
    assert [one.stage for one in checked] == ["1-warm-up", "2-on-policy"]
    assert [str(one.verdict) for one in checked] == ["warn", "refuse"]  # its random student, and no file
    assert "nowhere.jsonl" in checked[1].findings[0].evidence


def test_export_takes_the_student_of_the_latest_stage(
    plain: tuple[Recipe, Summary], half: Recipe, tmp_path: Path
) -> None:
    said = export(Path(plain[1].run), to=tmp_path / "last", merge=False)
    assert said == f"wrote the student of step 4 of stage 2-on-policy to {tmp_path / 'last'}, a plain folder"
    said = export(Path(half.output), to=tmp_path / "so-far", merge=False)
    assert said == f"wrote the student of step 3 of stage 1-warm-up to {tmp_path / 'so-far'}, a plain folder"
    said = export(Path(plain[1].run) / FOLDERS[0], to=tmp_path / "first", merge=False)
    assert said == f"wrote the student of step 3 to {tmp_path / 'first'}, a plain folder"
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("last", "so-far", "first")}
    assert weights["last"] == (Path(plain[1].student) / "model.safetensors").read_bytes()
    assert weights["so-far"] == weights["first"] != weights["last"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text(dump_toml(load_recipe(tiny_recipe(tmp_path) | {"stages": STAGES})))
    words = [str(tmp_path / "mine.toml"), "stages.0.train.steps=1", "stages.1.train.steps=1"]
    assert main(["train", *words]) == 0
    said = capsys.readouterr().err
    places = [said.index(f"stage {place + 1} of 2: {tmp_path / 'run' / name}\n") for place, name in enumerate(FOLDERS)]
    assert places == sorted(places)
    assert said.count("1 steps taken; the student is") == 2
    assert main(["export", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()
    assert main(["train", *words[:2], "stages.1.train.steps=2"]) == 1
    assert "2-on-policy holds a run with other settings (train.steps: 1 there, 2 now)" in capsys.readouterr().err
