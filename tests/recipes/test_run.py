"""`train`, `check` and `export` on whole runs of a second: what a run leaves behind, and who can read it."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.axes.names import Gives, Source
from etude.config.load import dump_toml, load_recipe
from etude.config.schema import Recipe
from etude.core.records import Scored
from etude.errors import CheckpointError, DataError, RecipeError, RecordError
from etude.models.backbone import TransformersBackbone
from etude.preflight.findings import Verdict
from etude.recipes.check import check
from etude.recipes.export import export
from etude.recipes.run import Summary, train
from etude.runtime.lock import locked
from etude.runtime.seeds import Key
from etude.runtime.tracking import METRICS, describe, read_metrics
from etude.testing import tiny_folder, tiny_model, tiny_recipe, word_tokenizer
from etude.training.learner import Learner, StepReport
from etude.training.loop import Parts

LORA = ["student.lora.rank=2", "student.lora.alpha=4"]
PROBE = torch.tensor([[5, 7, 8, 30, 11]])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Parts]:
    """The parts of each run, as the loop was given them."""
    from etude.recipes import run

    noted: list[Parts] = []
    real = run.run_loop
    monkeypatch.setattr(run, "run_loop", lambda parts, state: noted.append(parts) or real(parts, state))
    return noted


@pytest.fixture
def no_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr("etude.recipes.build.load_backbone", fail)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Summary]:
    """A run of four steps, kept by the tests that only look at it."""
    settings = tiny_recipe(tmp_path_factory.mktemp("finished"))
    changes = ["sampler.student_fraction=0.5", "evaluation.every=2", "train.updates_per_round=2"]
    recipe = load_recipe(settings, changes)
    return recipe, train(recipe, quiet=True)


def copied(finished: tuple[Recipe, Summary], folder: Path) -> Recipe:
    """That run moved to another place."""
    recipe = finished[0].model_copy(update={"output": str(folder)})
    shutil.copytree(finished[0].output, folder)
    (folder / "recipe.toml").write_text(dump_toml(recipe), encoding="utf-8")
    return recipe


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=PROBE).logits


def short(fields: Mapping[str, Any], text: str) -> float:
    """A verifier: the fewer words, the better."""
    return -float(len(text.split()))


class TestRewards:
    def test_it_learns_from_a_verifier_alone(self, tmp_path: Path) -> None:
        settings = {key: table for key, table in tiny_recipe(tmp_path).items() if key != "teacher"}
        changes = ["method=grpo", f"data.verifier={__name__}:short", "train.steps=30", "checkpoint.every=0"]
        summary = train(load_recipe(settings, changes), quiet=True)
        lines = [line for line in read_metrics(Path(summary.run) / "metrics.jsonl") if "reward/reward" in line]
        assert len(lines) == 30
        assert not any(name.startswith("divergence/") for line in lines for name in line)
        first, last = (sum(line["reward/reward"] for line in part) / 5 for part in (lines[:5], lines[-5:]))
        assert last > first + 1.0  # a word less
        assert summary.after["heldout/accuracy"] > summary.before["heldout/accuracy"] + 1.0
        assert "heldout/reverse_kl" not in summary.after

    def test_a_verifier_that_finds_no_number(self, tmp_path: Path) -> None:
        settings = tiny_recipe(tmp_path)
        changes = ["method=grpo", f"data.verifier={__name__}:lost", "evaluation.greedy=false"]
        with pytest.raises(RecordError, match="the reward of row 0 is nan; expected a finite number"):
            train(load_recipe(settings, changes), quiet=True)


def lost(fields: Mapping[str, Any], text: str) -> float:
    return float("nan")


class TestFolder:
    def test_what_is_in_it(self, finished: tuple[Recipe, Summary]) -> None:
        recipe, summary = finished
        folder = Path(recipe.output)
        assert {path.name for path in folder.iterdir()} == {
            "recipe.toml",
            "versions.json",
            "metrics.jsonl",
            "checkpoints",
            "samples",
            "summary.json",
        }
        assert load_recipe(folder / "recipe.toml") == recipe
        assert {path.name for path in (folder / "checkpoints").iterdir()} == {f"step-{n:06d}" for n in range(1, 5)}
        assert {path.name for path in (folder / "samples").iterdir()} == {"before.jsonl", "after.jsonl"}
        assert Path(summary.student) == folder / "checkpoints" / "step-000004" / "student"

    def test_the_summary_is_what_was_returned(self, finished: tuple[Recipe, Summary]) -> None:
        recipe, summary = finished
        written = json.loads((Path(recipe.output) / "summary.json").read_text())
        assert Summary(**written) == summary
        assert (summary.run, summary.steps) == (recipe.output, 4)
        assert summary.seconds > 0
        assert summary.before.keys() == summary.after.keys() > {"heldout/reverse_kl", "heldout/accuracy"}
        assert summary.after["heldout/reverse_kl"] < summary.before["heldout/reverse_kl"]

    def test_what_the_numbers_depend_on_besides_the_recipe(self, finished: tuple[Recipe, Summary]) -> None:
        facts = json.loads((Path(finished[0].output) / "versions.json").read_text())
        assert facts.keys() >= {"python", "platform", "torch", "transformers", "threads", "device", "sampling"}
        assert facts["torch"] == torch.__version__
        assert facts["threads"] == 1
        assert facts["device"]["name"] == "cpu"
        assert facts["sampling"] == {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "max_new_tokens": 6,
            "stop_ids": [2],
        }

    def test_a_line_a_step_and_one_an_evaluation_all_in_the_table(self, finished: tuple[Recipe, Summary]) -> None:
        lines = read_metrics(Path(finished[0].output) / "metrics.jsonl")
        assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 4, 4]
        emitted = {name for line in lines for name in line} - {"step"}
        assert all(describe(name) for name in emitted)
        # and what the table names is emitted, where this recipe has it
        named = {name for name in METRICS if "{" not in name}
        assert named - emitted == set()

    def test_the_rest_of_the_table_is_emitted_as_well(self, tmp_path: Path) -> None:
        term = {
            "name": "clipped",
            "support": "sampled",
            "estimator": "policy_gradient",
            "importance": "ppo_clip",
        }
        train(load_recipe(tiny_recipe(tmp_path) | {"terms": [term]}, ["train.steps=1"]), quiet=True)
        line = read_metrics(tmp_path / "run" / "metrics.jsonl")[1]
        assert {"divergence/clipped", "clipped/clipped", "tokens/clipped"} <= line.keys()

    @pytest.mark.parametrize(
        ("recipe", "metrics"),
        [
            ({"method": "exopd"}, {"divergence/reverse_kl", "clipped/reverse_kl"}),
            ({"method": "tip"}, {"divergence/reverse_kl", "selected/reverse_kl"}),
            (
                {"terms": [{}, {"name": "near", "teacher": "reference", "coefficient": 0.1}]},
                {"divergence/reverse_kl", "divergence/near"},
            ),
        ],
        ids=["exopd", "tip", "a reference KL"],
    )
    def test_methods_of_two_models_and_of_chosen_tokens(
        self, tmp_path: Path, recipe: dict[str, Any], metrics: set[str]
    ) -> None:
        settings = tiny_recipe(tmp_path) | recipe
        [checked] = check(load_recipe(settings))
        assert checked.verdict is not Verdict.REFUSE, checked
        changes = ["train.steps=30", "train.prompts_per_round=16", "checkpoint.every=0"]
        summary = train(load_recipe(settings, changes), quiet=True)
        lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "learning_rate" in line]
        assert len(lines) == summary.steps == 30
        assert all(metrics <= line.keys() for line in lines)
        assert not any(line["gradient/skipped"] for line in lines)
        assert summary.after["heldout/reverse_kl"] < summary.before["heldout/reverse_kl"]
        for line in lines:
            if "selected/reverse_kl" in line:  # a half, and a tenth of the rest
                assert line["selected/reverse_kl"] == pytest.approx(0.55, abs=0.05)
                assert line["tokens/reverse_kl"] == line["tokens/scored"] < line["rollout/tokens"]

    def test_answers_before_and_after(self, finished: tuple[Recipe, Summary]) -> None:
        for name, step in (("before", 0), ("after", 4)):
            text = (Path(finished[0].output) / "samples" / f"{name}.jsonl").read_text()
            answers = [json.loads(line) for line in text.splitlines()]
            assert [(answer["row"], answer["step"]) for answer in answers] == [(0, step), (1, step)]


class TestTheStudent:
    def test_plain_transformers_loads_it(self, tmp_path: Path, seen: list[Parts]) -> None:
        summary = train(load_recipe(tiny_recipe(tmp_path)), quiet=True)
        model, report = AutoModelForCausalLM.from_pretrained(summary.student, output_loading_info=True)
        assert not any(report.values())
        assert logits(model).equal(logits(seen[0].student.backbone.get_submodule("model")))
        assert not logits(model).equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "student")))
        tokenizer = AutoTokenizer.from_pretrained(summary.student)
        assert tokenizer.get_vocab() == word_tokenizer().get_vocab()

    def test_a_shortened_one_too(self, tmp_path: Path, seen: list[Parts]) -> None:
        recipe = load_recipe(tiny_recipe(tmp_path, layers=3), ["student.keep_layers=[0, 2]", "train.steps=1"])
        model = AutoModelForCausalLM.from_pretrained(train(recipe, quiet=True).student)
        assert model.config.num_hidden_layers == 2
        assert logits(model).equal(logits(seen[0].student.backbone.get_submodule("model")))

    # peft asks transformers by a name that transformers has given up
    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
    def test_peft_loads_adapters_and_export_merges_them(self, tmp_path: Path, seen: list[Parts]) -> None:
        settings = tiny_recipe(tmp_path)
        summary = train(load_recipe(settings, LORA), quiet=True)
        backbone = seen[0].student.backbone
        assert isinstance(backbone, TransformersBackbone)
        expected = logits(backbone.model)
        base = AutoModelForCausalLM.from_pretrained(settings["student"]["model"])
        assert not logits(base).equal(expected)
        assert logits(PeftModel.from_pretrained(base, summary.student)).equal(expected)

        assert "an adapter folder" in export(Path(summary.run), to=tmp_path / "adapters", merge=False)
        base = AutoModelForCausalLM.from_pretrained(settings["student"]["model"])
        assert logits(PeftModel.from_pretrained(base, str(tmp_path / "adapters"))).equal(expected)

        assert "a plain folder" in export(Path(summary.run), to=tmp_path / "merged", merge=True)
        merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
        assert not any(report.values())
        assert not isinstance(merged, PeftModel)
        torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=0)
        assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab() == word_tokenizer().get_vocab()


class TestExport:
    def test_the_student_as_it_is(self, finished: tuple[Recipe, Summary], tmp_path: Path) -> None:
        said = export(Path(finished[1].run), to=tmp_path / "out", merge=True)
        assert said == f"wrote the student of step 4 to {tmp_path / 'out'}, a plain folder"
        theirs, ours = (Path(folder) / "model.safetensors" for folder in (finished[1].student, tmp_path / "out"))
        assert theirs.read_bytes() == ours.read_bytes()

    def test_what_cannot_be_exported(self, finished: tuple[Recipe, Summary], tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match="holds no run"):
            export(tmp_path, to=tmp_path / "out", merge=False)
        with pytest.raises(RecipeError, match="exists already"):
            export(Path(finished[1].run), to=tmp_path, merge=False)
        recipe = copied(finished, tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        with pytest.raises(RecipeError, match="no whole checkpoint yet"):
            export(Path(recipe.output), to=tmp_path / "out", merge=False)


class TestAgain:
    def test_a_finished_run_is_only_summarised(
        self,
        finished: tuple[Recipe, Summary],
        tmp_path: Path,
        no_model_loads: None,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        recipe = copied(finished, tmp_path / "run")
        before = {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}
        (tmp_path / "run" / "summary.json").unlink()
        summary = train(recipe)
        assert capsys.readouterr().err == f"run {recipe.output}: 4 steps taken; the student is {summary.student}\n"
        assert (summary.before, summary.after) == (finished[1].before, finished[1].after)
        assert summary.run == str(tmp_path / "run")
        assert Path(summary.student) == tmp_path / "run" / "checkpoints" / "step-000004" / "student"
        assert train(recipe, quiet=True) == summary  # the seconds too
        after = {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}
        assert before.keys() == after.keys()
        assert [path.name for path in before if before[path] != after[path]] == ["summary.json"]

    def test_changed_settings_are_listed_and_refused(
        self, finished: tuple[Recipe, Summary], tmp_path: Path, no_model_loads: None
    ) -> None:
        recipe = copied(finished, tmp_path / "run")
        changed = load_recipe(
            tomllib.loads(dump_toml(recipe)), ["optim.learning_rate=0.5", "data.eval_size=", "loss.temperature=2.0"]
        )
        before = (tmp_path / "run" / "recipe.toml").read_bytes()
        with pytest.raises(CheckpointError) as refused:
            train(changed, quiet=True)
        assert str(refused.value) == (
            f"{tmp_path / 'run'} holds a run with other settings (data.eval_size: 4 there, unset now; "
            "loss.temperature: 1.0 there, 2.0 now; optim.learning_rate: 0.01 there, 0.5 now); "
            "start over with --fresh, or give this one another name or output"
        )
        assert (tmp_path / "run" / "recipe.toml").read_bytes() == before

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            (["train.steps=9"], True),
            (["train.steps=9", "evaluation.every=1", "checkpoint.every=3"], True),
            (["train.steps=9", "seed=1"], False),
            (["evaluation.every=1"], False),
        ],
    )
    def test_more_steps_are_refused_with_the_way_to_them(
        self, finished: tuple[Recipe, Summary], changes: list[str], told: bool
    ) -> None:
        changed = load_recipe(tomllib.loads(dump_toml(finished[0])), changes)
        with pytest.raises(CheckpointError) as refused:
            train(changed, quiet=True)
        way = f"; to train further, start a new run with student.model={finished[1].student}"
        assert str(refused.value).endswith(f"another name or output{way if told else ''}")

    def test_changed_data_are_not_mixed_into_a_run(self, tmp_path: Path) -> None:
        recipe = load_recipe(tiny_recipe(tmp_path))
        train(recipe, quiet=True)
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
        path = tmp_path / "prompts.jsonl"
        text = path.read_text()
        path.write_text(text.replace('"w5', '"w6', 1))
        with pytest.raises(CheckpointError, match="the prompts are not those the run in .* began with; bring those"):
            train(recipe, quiet=True)
        path.write_text(text)
        assert train(recipe, quiet=True).steps == 4

    @pytest.mark.parametrize("fresh", [False, True])
    def test_a_folder_another_process_trains_in_is_left_alone(
        self, finished: tuple[Recipe, Summary], tmp_path: Path, fresh: bool
    ) -> None:
        recipe = copied(finished, tmp_path / "run")
        with locked(tmp_path / "run"), pytest.raises(RecipeError, match=r"another process is training in .*; wait"):
            train(recipe, fresh=fresh, quiet=True)
        assert train(recipe, quiet=True).steps == 4

    @pytest.mark.parametrize(("every", "then"), [(2, "goes on from step 2"), (0, "starts over")])
    def test_an_interruption_says_where_it_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, then: str
    ) -> None:
        real = Learner.learn

        def learn(self: Learner, prepared: Sequence[Scored], step: int, num_rows: int) -> Iterator[StepReport]:
            if step == 3:
                raise KeyboardInterrupt
            return real(self, prepared, step, num_rows)

        monkeypatch.setattr(Learner, "learn", learn)
        with pytest.raises(KeyboardInterrupt, match=f"^interrupted after step 3; the same command {then}$"):
            train(load_recipe(tiny_recipe(tmp_path), [f"checkpoint.every={every}"]), quiet=True)

    def test_fresh_starts_over_and_leaves_what_is_not_ours(
        self, finished: tuple[Recipe, Summary], tmp_path: Path
    ) -> None:
        recipe = copied(finished, tmp_path / "run")
        (tmp_path / "run" / "notes.txt").write_text("mine")
        shorter = load_recipe(tomllib.loads(dump_toml(recipe)), ["train.steps=1"])
        summary = train(shorter, fresh=True, quiet=True)
        assert summary.steps == 1
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
        assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 1]
        assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
        assert load_recipe(tmp_path / "run" / "recipe.toml") == shorter

    def test_fresh_removes_nothing_for_a_recipe_that_cannot_run(
        self, finished: tuple[Recipe, Summary], tmp_path: Path
    ) -> None:
        recipe = copied(finished, tmp_path / "run")
        mistaken = load_recipe(tomllib.loads(dump_toml(recipe)), ["data.prompts=nowhere.jsonl"])
        with pytest.raises(DataError, match="nowhere.jsonl"):
            train(mistaken, fresh=True, quiet=True)
        assert train(recipe, quiet=True).steps == 4

    def test_a_run_that_never_began_may_be_changed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = tiny_recipe(tmp_path)

        def out_of_memory(*_: Any) -> None:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr("etude.recipes.run.run_loop", out_of_memory)
            with pytest.raises(MemoryError):
                train(load_recipe(settings), quiet=True)
        assert (tmp_path / "run" / "recipe.toml").exists()
        assert train(load_recipe(settings, ["train.steps=1"]), quiet=True).steps == 1

    def test_nothing_is_written_for_a_recipe_that_cannot_run(self, tmp_path: Path) -> None:
        settings = tiny_recipe(tmp_path)
        with pytest.raises(DataError):
            train(load_recipe(settings, ["data.prompts=nowhere.jsonl"]), quiet=True)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("fresh", [False, True])
    @pytest.mark.parametrize("name", ["notes.txt", "recipe.toml"])
    def test_a_folder_of_somebodys_is_left_alone(self, tmp_path: Path, name: str, fresh: bool) -> None:
        settings = tiny_recipe(tmp_path)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / name).write_text("seed = 1\n")
        with pytest.raises(RecipeError, match="is not empty and holds no run; choose another"):
            train(load_recipe(settings), fresh=fresh, quiet=True)
        assert (tmp_path / "run" / name).read_text() == "seed = 1\n"
        with pytest.raises(RecipeError, match=r"notes.txt is a file|recipe.toml is a file"):
            train(load_recipe(settings, [f"output={tmp_path / 'run' / name}"]), quiet=True)

    def test_a_folder_that_cannot_be_used_is_one_sentence(self, tmp_path: Path, no_model_loads: None) -> None:
        (tmp_path / "file").write_text("in the way")
        recipe = load_recipe(tiny_recipe(tmp_path), [f"output={tmp_path / 'file' / 'run'}"])
        with pytest.raises(RecipeError, match=r"the run's folder .*file/run cannot be used: .*choose another output"):
            train(recipe, quiet=True)

    def test_a_disk_too_small_for_the_first_checkpoint_is_told_its_size(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Weights, and for AdamW two tensors of their size more: nothing smaller can be a checkpoint."""
        weights = sum(weight.nbytes for weight in tiny_model(layers=1).parameters())
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9000, 8000, 1000))  # pyright: ignore
        with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes and 1,000 are free") as refusal:
            train(load_recipe(tiny_recipe(tmp_path)), quiet=True)
        needed = int(re.search(r"needs ([\d,]+) bytes", str(refusal.value))[1].replace(",", ""))  # pyright: ignore
        assert 3 * weights <= needed < 3.1 * weights

    def test_what_a_killed_beginning_leaves_is_no_obstacle(self, tmp_path: Path) -> None:
        settings = tiny_recipe(tmp_path)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / ".recipe.toml").write_text("see")
        (tmp_path / "run" / "versions.json").write_text("{}")
        assert train(load_recipe(settings, ["train.steps=1"]), quiet=True).steps == 1

    def test_when_no_checkpoint_is_whole(self, finished: tuple[Recipe, Summary], tmp_path: Path) -> None:
        recipe = copied(finished, tmp_path / "run")
        for path in (tmp_path / "run" / "checkpoints").glob("*/optimizer.safetensors"):
            path.unlink()
        with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged \(optimizer.safetensors is miss"):
            train(recipe, quiet=True)

    def test_another_number_of_threads_is_told(
        self, finished: tuple[Recipe, Summary], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        copied(finished, tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
        path = tmp_path / "run" / "recipe.toml"
        path.write_text(path.read_text().replace("threads = 1", "threads = 2"))
        try:
            train(load_recipe(path))
        finally:
            torch.set_num_threads(1)
        said = capsys.readouterr().err
        assert "going on with 2 threads a run that used 1: sums round differently" in said
        assert "going on after step 3\n" in said


class TestWhatIsTrained:
    def test_cut_rows_left_out(self, tmp_path: Path) -> None:
        """Case 7 in a whole run: a cut row has exactly max_new_tokens tokens, and none of them is counted."""
        changes = ["train.prompts_per_round=8", "train.steps=6", "train.tokens_per_micro_batch=24"]
        recipe = load_recipe(tiny_recipe(tmp_path), [*changes, "terms.0.train_truncated=false"])
        train(recipe, quiet=True)
        lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "tokens/scored" in line]
        for line in lines:
            finished = line["rollout/tokens"] - 8 * line["rollout/truncated"] * recipe.sampler.max_new_tokens
            assert line["tokens/scored"] == line["tokens/reverse_kl"] == line["tokens/written"] == finished
        assert any(0 < line["rollout/truncated"] < 1 for line in lines)

    def test_rows_that_never_train_anything_end_the_run(self, tmp_path: Path) -> None:
        changes = ["terms.0.train_truncated=false", "sampler.max_new_tokens=1", "train.steps=9"]
        with pytest.raises(RecipeError, match="no token was trained in 3 steps in a row; .* train_truncated = false"):
            train(load_recipe(tiny_recipe(tmp_path), [*changes, "train.prompts_per_round=2"]), quiet=True)
        skipped = [line.get("gradient/skipped") for line in read_metrics(tmp_path / "run" / "metrics.jsonl")[1:]]
        assert skipped == [1.0, 1.0]

    def test_dropped_prompts_are_told_and_written_prompts_fit(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Case 9 in a whole run: limit 16, window 20, 4 new tokens; prompts of 15, 16, 17 and 200 tokens."""
        settings = tiny_recipe(tmp_path, window=20)
        rows = [{"prompt": " ".join(["w3"] * length), "answer": "w3"} for length in (15, 16, 17, 200)]
        for name, kept in (("long", rows), ("short", [{"prompt": "w3", "answer": "w3"}])):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        changes = [
            f"data.prompts={tmp_path / 'long.jsonl'}",
            f"data.eval_prompts={tmp_path / 'short.jsonl'}",
            "data.eval_size=",
            "data.max_prompt_tokens=16",
            "data.long_prompts=drop",
            "sampler.max_new_tokens=4",
            "train.steps=2",
        ]
        [checked] = check(load_recipe(settings, changes))
        assert any("2 dropped as too long" in finding.evidence for finding in checked.findings)
        assert train(load_recipe(settings, changes)).steps == 2
        assert "prompts: 2 to train on, 1 held out, 2 dropped as too long\n" in capsys.readouterr().err

    def test_a_hostile_folder_changes_no_number(self, finished: tuple[Recipe, Summary], tmp_path: Path) -> None:
        """Case 21 in a whole run: the same models with generation settings of their own beside them."""
        recipe = finished[0]
        hostile = Path(tiny_folder(tmp_path / "hostile", layers=1))
        settings = {"temperature": 0.1, "top_k": 1, "top_p": 0.001, "repetition_penalty": 1.3, "min_new_tokens": 5}
        (hostile / "generation_config.json").write_text(
            json.dumps({**settings, "do_sample": True, "suppress_tokens": [7], "eos_token_id": 2})
        )
        student = recipe.student.model_copy(update={"model": str(hostile)})
        changed = recipe.model_copy(update={"output": str(tmp_path / "run"), "student": student})
        summary = train(changed, quiet=True)
        assert (summary.before, summary.after) == (finished[1].before, finished[1].after)
        for name in ("before", "after"):
            ours, theirs = (Path(run) / "samples" / f"{name}.jsonl" for run in (summary.run, recipe.output))
            assert ours.read_text() == theirs.read_text()
        weights = [Path(made.student) / "model.safetensors" for made in (summary, finished[1])]
        assert weights[0].read_bytes() == weights[1].read_bytes()

    def test_nothing_is_said_when_quiet(
        self, finished: tuple[Recipe, Summary], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        recipe = copied(finished, tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
        train(recipe, quiet=True)
        assert capsys.readouterr() == ("", "")


def test_sequence_level_distillation_trains_on_what_the_teacher_writes(tmp_path: Path, seen: list[Parts]) -> None:
    """Method seqkd: every row is the teacher's own draw, and the divergence is the cross-entropy of its tokens."""
    recipe = load_recipe(tiny_recipe(tmp_path) | {"method": "seqkd"}, ["train.steps=3"])
    train(recipe, quiet=True)
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "tokens/scored" in line]
    for line in lines:
        assert line["rollout/student"] == 0.0
        assert line["tokens/scored"] == line["tokens/forward_kl"] == line["rollout/tokens"]
        assert line["divergence/forward_kl"] == pytest.approx(-line["student/logprob"], abs=1e-6)
    [parts] = seen
    rollouts = parts.sampler.sample(parts.prompts(0), Key(0, "sample", 0, 0))
    marks = parts.teachers["teacher"].score(rollouts, frozenset({Gives.SAMPLED_LOGPROBS}), 1.0)
    for rollout, mark in zip(rollouts, marks, strict=True):
        assert rollout.source is Source.TEACHER
        torch.testing.assert_close(rollout.raw_logprobs, mark.sampled_logprobs, atol=1e-5, rtol=1e-5)


def test_an_adaptive_share_with_replay(tmp_path: Path) -> None:
    """Method distillm: at a rate that only does harm, rows of the data give way to the student's, old and new."""
    changes = [
        "train.steps=8",
        "optim.learning_rate=3.0",
        "evaluation.every=1",
        "sampler.adaptive.rise=1.0",
        "sampler.mix=row",
        "sampler.replay_fraction.last=8",
    ]
    train(load_recipe(tiny_recipe(tmp_path) | {"method": "distillm"}, changes), quiet=True)
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "tokens/scored" in line]
    assert [line["rollout/student"] for line in lines] == [0.0] + [1.0] * 7  # the first evaluation finds it worse
    assert [line["rollout/replayed"] for line in lines][:2] == [0.0, 0.0]
    assert any(line["rollout/replayed"] for line in lines)
    assert any(line["rollout/age"] > 1.0 for line in lines)
