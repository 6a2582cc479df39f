"""Recorded once, trained without writing and without the teacher: the same rows, the same marks, the same steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from etude.config.load import load_recipe
from etude.config.schema import Recipe
from etude.core.records import Rollout
from etude.errors import CheckpointError, PairError, RecipeError
from etude.models.backbone import TransformersBackbone
from etude.models.cache import ScoreStore
from etude.models.recorded import Recording
from etude.recipes.build import build
from etude.recipes.check import require_readable
from etude.recipes.record import record
from etude.recipes.run import train
from etude.runtime.seeds import Key
from etude.runtime.tracking import Tracker, read_metrics
from etude.runtime.world import World
from etude.testing import tiny_folder, tiny_recipe, word_tokenizer
from etude.training.loop import Parts, gather
from etude.training.state import State

RATIO = {"support": "sampled", "estimator": "policy_gradient", "importance": "ppo_clip"}
TERMS: dict[str, list[dict[str, Any]]] = {"full": [{}], "sampled": [RATIO], "both": [{}, RATIO | {"name": "drawn"}]}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return tiny_recipe(tmp_path)


def of(settings: dict[str, Any], *changes: str, terms: str = "sampled") -> Recipe:
    """The recipe with a recording and scores in a folder beside its run."""
    folder = Path(settings["output"]).parent / "recording"
    places = [f'sampler.recorded="{folder}"', f'teacher.scores="{folder}"']
    return load_recipe(settings | {"terms": TERMS[terms]}, [*places, *changes])


def parts_of(recipe: Recipe, world: World | None = None) -> Parts:
    tracker = Tracker(None, console=False, total_steps=recipe.train.steps)
    return build(recipe, folder=Path(recipe.output), world=world or World(), tracker=tracker)


def facts(rollouts: list[Rollout]) -> list[tuple[Any, ...]]:
    """Everything of rollouts, comparable."""
    return [
        (
            r.prompt.row,
            r.prompt.group,
            r.prompt.token_ids.tolist(),
            dict(r.prompt.example),
            r.completion_ids.tolist(),
            r.source,
            r.finish_reason,
            r.version,
            None if r.behaviour_logprobs is None else r.behaviour_logprobs.tolist(),
            None if r.raw_logprobs is None else r.raw_logprobs.tolist(),
        )
        for r in rollouts
    ]


def loads(monkeypatch: pytest.MonkeyPatch, *models: str) -> list[str]:
    """Notes which models' weights are read."""
    from etude.recipes import build
    from etude.recipes import record as recording

    noted: list[str] = []
    real: Callable[..., TransformersBackbone] = build.load_backbone

    def noting(name: str, **options: Any) -> TransformersBackbone:
        noted.append(Path(name).name)
        return real(name, **options)

    for module in (build, recording):
        monkeypatch.setattr(module, "load_backbone", noting)
    return noted


class TestRows:
    def test_every_round_is_the_one_the_first_student_would_write(self, settings: dict[str, Any]) -> None:
        """An unrecorded run writes the first of them itself; the others are those of a run that does not learn."""
        recipe = of(settings, "sampler.samples_per_prompt=2", "train.prompts_per_round=2")
        recording = record(recipe, quiet=True)
        assert recording.rounds == 4
        parts = parts_of(load_recipe(settings, ["sampler.samples_per_prompt=2", "train.prompts_per_round=2"]))
        for number in range(4):
            expected = parts.sampler.sample(parts.prompts(number), Key(recipe.seed, "sample", 0, number))
            assert facts(recording.round(number)) == facts(expected)

    @pytest.mark.parametrize("size", [1, 2])
    def test_a_run_takes_them_each_rank_its_own(
        self, settings: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(World, "wrap", lambda self, module: module)  # there is no second process
        record(of(settings), quiet=True)
        recipe = of(settings, "data.prompts=" + other_prompts(settings))  # which the recorded ones take the place of
        recording = Recording(Path(recipe.sampler.recorded or ""))
        for rank in range(size):
            parts = parts_of(recipe, World(rank, size))
            mine = [prompt for prompt in parts.prompts(1) if prompt.row % size == rank]
            found = parts.sampler.sample(mine, Key(recipe.seed, "sample", 0, 1))
            expected = [rollout for rollout in recording.round(1) if rollout.prompt.row % size == rank]
            assert facts(found) == facts(expected)
            assert parts.teachers["teacher"].score(found, parts.objective.needs("teacher"), 1.0)

    def test_fewer_rounds_come_again(self, settings: dict[str, Any]) -> None:
        recipe = of(settings)
        recording = record(recipe, rounds=2, quiet=True)
        assert recording.rounds == 2
        rows, _ = gather(parts_of(recipe), State(), number=3)
        assert facts([row.rollout for row in rows]) == facts(recording.round(1))

    def test_the_same_again_writes_nothing_and_more_rounds_are_added(
        self, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = record(of(settings), rounds=2, quiet=True)
        rows = facts(first.round(1))
        noted = loads(monkeypatch)
        assert record(of(settings), rounds=2, quiet=True).made == first.made
        assert noted == ["teacher"]
        longer = record(of(settings), rounds=3, quiet=True)
        assert (longer.rounds, facts(longer.round(1))) == (3, rows)
        assert noted == ["teacher", "student", "teacher"]

    def test_a_killed_recording_is_none_until_it_is_taken_up(
        self, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from etude.models import recorded

        class Killed(Exception):
            pass

        recipe, real = of(settings), recorded.Recorder.add

        def dying(self: recorded.Recorder, number: int, rollouts: Any) -> None:
            if number == 2:
                raise Killed
            real(self, number, rollouts)

        monkeypatch.setattr(recorded.Recorder, "add", dying)
        with pytest.raises(Killed):
            record(recipe, quiet=True)
        with pytest.raises(RecipeError, match="only the beginning of a recording"):
            train(recipe, quiet=True)
        monkeypatch.setattr(recorded.Recorder, "add", real)
        whole = record(recipe, quiet=True)
        other = of(settings | {"output": settings["output"] + "s/run"})
        assert [facts(whole.round(n)) for n in range(4)] == [
            facts(record(other, quiet=True).round(n)) for n in range(4)
        ]


def other_prompts(settings: dict[str, Any]) -> str:
    path = Path(settings["output"]).parent / "others.jsonl"
    path.write_text(Path(settings["data"]["prompts"]).read_text().replace('"w1 ', '"w2 '))
    return str(path)


def traces(folder: str) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """The student and what was logged, times aside."""
    lines = read_metrics(Path(folder) / "metrics.jsonl")
    kept = [
        {key: value for key, value in line.items() if not key.startswith("time/") and "per_second" not in key}
        for line in lines
    ]
    return load_file(Path(folder) / "checkpoints/step-000004/student/model.safetensors"), kept


class TestTraining:
    @pytest.mark.parametrize("terms", TERMS)
    def test_with_and_without_the_store_with_and_without_the_teacher(
        self, settings: dict[str, Any], terms: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changes = ["train.updates_per_round=2", "train.steps=4"]
        recipe = of(settings, *changes, terms=terms)
        record(recipe, quiet=True)
        runs = {"live": ["teacher.scores="], "stored": [], "alone": ["teacher.model="]}
        students, metrics = dict[str, Any](), dict[str, Any]()
        for name, more in runs.items():
            folder = f"{settings['output']}-{name}"
            noted = loads(monkeypatch)
            train(of(settings, *changes, *more, f"output={folder}", terms=terms), quiet=True)
            assert noted == (["student"] if name == "alone" else ["student", "teacher"])
            students[name], metrics[name] = traces(folder)
        for name in ("stored", "alone"):
            assert all(students[name][weight].equal(value) for weight, value in students["live"].items())
        assert metrics["stored"] == metrics["live"]
        left_out = {"heldout/reverse_kl", "heldout/entropy"}
        assert left_out <= metrics["live"][0].keys()
        for alone, live in zip(metrics["alone"], metrics["live"], strict=True):
            assert alone == {key: value for key, value in live.items() if key not in left_out}

    def test_the_rows_are_old_from_the_second_round_on(self, settings: dict[str, Any]) -> None:
        recipe = of(settings)
        record(recipe, quiet=True)
        train(recipe, quiet=True)
        lines = [line for line in traces(recipe.output)[1] if "tokens/scored" in line]
        assert [line["rollout/age"] for line in lines] == [0.0, 1.0, 2.0, 3.0]
        assert [line["rollout/replayed"] for line in lines] == [0.0, 1.0, 1.0, 1.0]

    def test_scores_that_are_missing_are_made_and_kept(self, settings: dict[str, Any]) -> None:
        """Without a recording: the student writes, and the same run again finds every row."""
        folder = Path(settings["output"]).parent / "kept"
        recipe = load_recipe(settings, [f'teacher.scores="{folder}"'])
        train(recipe, quiet=True)
        store = ScoreStore(folder / "scores" / "teacher")
        assert 4 < len(store) <= 16
        train(recipe, fresh=True, quiet=True)
        assert len(ScoreStore(folder / "scores" / "teacher")) == len(store)

    def test_the_datasets_rows_are_marked_as_well(self, settings: dict[str, Any]) -> None:
        recipe = of(settings, "sampler.student_fraction=0.5", terms="full")
        record(recipe, quiet=True)
        train(of(settings, "sampler.student_fraction=0.5", "teacher.model=", terms="full"), quiet=True)

    def test_the_person_is_told(self, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
        record(of(settings))
        told = capsys.readouterr().err
        for words in ("written: round 4/4", "marked: round 4/4", "recorded: 4 rounds of 4 rows by", "stored scores: "):
            assert words in told
        train(of(settings, "teacher.model="))
        told = capsys.readouterr().err
        assert "recorded rows: 4 rounds of 4 rows by" in told
        assert f"rows by {settings['teacher']['model']} (weights " in told
        assert "no teacher's weights are loaded: the held-out divergence is left out" in told

    def test_check_looks_at_both(self, settings: dict[str, Any]) -> None:
        with pytest.raises(RecipeError, match="there is no recording in"):
            require_readable(of(settings), World())
        record(of(settings), quiet=True)
        told = require_readable(of(settings, "teacher.model="), World()).said
        assert any(line.startswith("recorded rows: 4 rounds") for line in told)
        assert any(line.startswith("stored scores: ") for line in told)

    def test_another_recording_is_not_mixed_into_a_run(self, settings: dict[str, Any]) -> None:
        recipe = of(settings)
        record(recipe, quiet=True)
        train(recipe, quiet=True)
        shutil.rmtree(Path(recipe.output) / "checkpoints" / "step-000004")
        folder = Path(recipe.sampler.recorded or "")
        shutil.rmtree(folder)
        record(of(settings, "seed=1"), quiet=True)
        with pytest.raises(CheckpointError, match="are not those the run in .* began with; bring those back"):
            train(recipe, quiet=True)


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ("sampler.temperature=0.7", "sampler.temperature: 1.0 there, 0.7 now; rows"),
            ("sampler.max_new_tokens=5", "sampler.max_new_tokens: 6 there, 5 now"),
            ('sampler.stop=["w1"]', r"stop ids: \[2\] there, \[2, 8\] now"),
            ("sampler.samples_per_prompt=2", "rows: 4 there, 8 now; sampler.samples_per_prompt: 1 there, 2 now"),
        ],
    )
    def test_rows_written_in_another_way(self, settings: dict[str, Any], change: str, words: str) -> None:
        record(of(settings), quiet=True)
        with pytest.raises(RecipeError, match=words.removesuffix("; rows")):
            require_readable(of(settings, change), World())

    def test_rows_of_another_tokenizer(self, settings: dict[str, Any], tmp_path: Path) -> None:
        record(of(settings), quiet=True)
        other = tiny_folder(tmp_path / "other", layers=1, tokenizer=word_tokenizer(26), rows=33)
        with pytest.raises(RecipeError, match="tokenizer: "):
            require_readable(of(settings, f"student.model={other}", f"teacher.model={other}"), World())

    def test_scores_of_another_teacher(self, settings: dict[str, Any], tmp_path: Path) -> None:
        record(of(settings), quiet=True)
        other = tiny_folder(tmp_path / "other", layers=1, seed=5)
        with pytest.raises(PairError, match="another teacher's weights"):
            require_readable(of(settings, f"teacher.model={other}"), World())

    def test_scores_at_another_temperature_or_precision(self, settings: dict[str, Any]) -> None:
        record(of(settings), quiet=True)
        for change in ("teacher.model=", "seed=0"):
            with pytest.raises(PairError, match="another loss temperature"):
                require_readable(of(settings, change, "loss.temperature=2.0"), World())
        with pytest.raises(PairError, match="another precision"):
            require_readable(of(settings, "teacher.dtype=bfloat16"), World())

    @pytest.mark.parametrize("model", [[], ["teacher.model="]])
    def test_scores_of_another_kind(self, settings: dict[str, Any], model: list[str]) -> None:
        record(of(settings), quiet=True)
        with pytest.raises(PairError, match="sampled_logprobs, and a term needs hidden_states"):
            require_readable(of(settings, *model, terms="full"), World())

    def test_a_row_without_a_score_where_there_is_no_teacher(self, settings: dict[str, Any]) -> None:
        record(of(settings), quiet=True)
        with pytest.raises(PairError, match="have no stored score in .* there is no teacher to ask"):
            train(of(settings, "teacher.model=", "sampler.recorded="), quiet=True)

    def test_no_scores_where_there_is_no_teacher(self, settings: dict[str, Any]) -> None:
        with pytest.raises(PairError, match="there are no stored scores in"):
            require_readable(of(settings, "teacher.model=", "sampler.recorded="), World())

    def test_a_longer_row_than_the_student_reads(self, settings: dict[str, Any], tmp_path: Path) -> None:
        long, short = (tiny_folder(tmp_path / str(n), layers=1, window=n) for n in (64, 20))
        path = tmp_path / "long.jsonl"
        path.write_text("".join(f'{{"prompt": "{" ".join(["w1"] * 30)}"}}\n' for _ in range(24)))
        models = [f"student.model={long}", f"teacher.model={long}", "data.verifier="]
        record(of(settings, *models, f"data.prompts={path}"), quiet=True)
        with pytest.raises(PairError, match=r"has 36 tokens, and the student reads at most 20"):
            train(of(settings, f"student.model={short}", f"teacher.model={long}", "data.verifier="), quiet=True)

    def test_what_cannot_be_recorded(self, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        recipe = of(settings)
        with pytest.raises(RecipeError, match="--rounds 0 records nothing"):
            record(recipe, rounds=0)
        with pytest.raises(RecipeError, match="names no folder for the recording"):
            record(load_recipe(settings))
        with pytest.raises(PairError, match="scores cannot be made without a teacher"):
            record(of(settings, "teacher.model="))
        with pytest.raises(RecipeError, match="a recipe with stages has no one student"):
            record(load_recipe(settings, ["stages.0.train.steps=1"]))
        monkeypatch.setattr(World, "current", lambda: World(0, 2))
        with pytest.raises(RecipeError, match="one process's work and there are 2"):
            record(recipe)

    def test_without_a_teacher_there_are_rows_alone(self, settings: dict[str, Any]) -> None:
        folder = Path(settings["output"]).parent / "recording"
        grpo = {"method": "grpo", **{key: table for key, table in settings.items() if key != "teacher"}}
        recipe = load_recipe(grpo, [f'sampler.recorded="{folder}"', "sampler.samples_per_prompt=2"])
        assert record(recipe, quiet=True).rounds == 4
        assert not (folder / "scores").exists()
        train(recipe, quiet=True)


def test_the_shipped_recipe(tmp_path: Path) -> None:
    """Its own commands, with a few walks each by the student before it is fine-tuned; the last without the teacher."""
    folder = f'"{tmp_path}/recording"'
    places = [f"sampler.recorded={folder}", f"teacher.scores={folder}", "student.model=etude:maze-student"]
    changes = [*places, "train.steps=2", "train.prompts_per_round=8"]
    record(load_recipe("lightning", changes), quiet=True)
    alone = [*changes, "teacher.model=", "evaluation.prompts=8", f'output="{tmp_path}/run"', "device.threads=1"]
    summary = train(load_recipe("lightning", alone), quiet=True)
    assert summary.steps == 2
    assert "heldout/reverse_kl" not in summary.after


def test_states_are_stored_in_the_teachers_precision(settings: dict[str, Any]) -> None:
    recipe = of(settings, "teacher.dtype=bfloat16", terms="full")
    record(recipe, quiet=True)
    [row, *_] = gather(parts_of(of(settings, "teacher.model=", terms="full")), State(), number=0)[0]
    hidden = row.scores["teacher"].hidden
    assert hidden is not None
    assert hidden.dtype == torch.bfloat16
