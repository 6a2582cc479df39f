"""From a recipe to the parts of a run: what is made, what is refused, and that nothing is loaded before it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.axes.names import Divergence, FinishReason, Gives, Source, Support
from etude.config.load import load_recipe
from etude.config.schema import Recipe
from etude.config.tables.terms import TermConfig
from etude.core.objective import Objective, Term
from etude.core.records import Prompt, Rollout, as_ids
from etude.errors import DataError, ModelError, PairError, RecipeError
from etude.models.adaptive import AdaptiveFraction
from etude.models.backbone import TransformersBackbone
from etude.models.mixture import DatasetSampler, MixtureSampler
from etude.models.replay import ReplaySampler
from etude.models.roles import AbstractDecoding, AbstractSampler
from etude.models.sampling import InProcessSampler, SamplingSettings
from etude.recipes.build import build, objective_of, require_gives, term_of
from etude.recipes.check import require_readable
from etude.recipes.data import read_data
from etude.runtime.seeds import Key
from etude.runtime.tracking import Tracker
from etude.runtime.world import World
from etude.testing import tiny_folder, tiny_recipe, word_tokenizer
from etude.training.loop import Parts, gather
from etude.training.state import State

GOLD_TERM = {"name": "gold", "teacher": "label", "divergence": "forward_kl", "sources": ["dataset"]}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_recipe(tmp_path_factory.mktemp("build"))


def rollout_to(prompt: Prompt, ids: list[int]) -> Rollout:
    return Rollout(prompt, as_ids(ids), Source.STUDENT, FinishReason.STOP, version=0)


def built(recipe: Recipe, world: World | None = None) -> Parts:
    tracker = Tracker(None, console=False, total_steps=recipe.train.steps)
    return build(recipe, folder=Path(recipe.output), world=world or World(), tracker=tracker)


def made(settings: dict[str, Any], *changes: str) -> Parts:
    return built(load_recipe(settings, changes))


def readable(settings: dict[str, Any]) -> None:
    require_readable(load_recipe(settings), World())


class TestTerms:
    def test_a_terms_keys_are_the_arguments_of_term(self) -> None:
        """But for special tokens: a recipe says whether, a term says which."""
        keys = set(TermConfig.model_fields) - {"train_special"}
        assert keys == {field.name for field in fields(Term)} - {"left_out_ids"}

    def test_every_value_arrives(self) -> None:
        config = TermConfig.model_validate(
            {
                "name": "mine",
                "divergence": "jsd",
                "beta": 0.9,
                "coefficient": 2.0,
                "sources": ["student"],
                "train_truncated": False,
                "source_weights": {"student": 0.5},
                "right_weight": 2.0,
                "reduction": "sequence_mean",
            }
        )
        term = term_of(config, {3})
        assert (term.source_weights, term.right_weight, term.left_out_ids) == ({Source.STUDENT: 0.5}, 2.0, frozenset())
        assert (term.name, term.divergence, term.beta, term.coefficient) == ("mine", Divergence.JSD, 0.9, 2.0)
        assert (set(term.sources), term.train_truncated, term.reduction) == ({Source.STUDENT}, False, "sequence_mean")

    def test_what_all_terms_share(self, settings: dict[str, Any]) -> None:
        recipe = load_recipe(
            settings | {"terms": [{}, GOLD_TERM]},
            ["loss.temperature=2.0", "loss.chunk_bytes=2000000", "sampler.student_fraction=0.5"],
        )
        objective = objective_of(recipe)
        assert [term.name for term in objective.terms] == ["reverse_kl", "gold"]
        assert (objective.temperature, objective.chunk_bytes) == (2.0, 2_000_000)


class TestNeeds:
    FULL = Objective([Term()])
    SAMPLED = Objective([Term(support=Support.SAMPLED)])

    def test_enough_is_enough(self) -> None:
        require_gives(self.FULL, {"teacher": frozenset({Gives.HIDDEN_STATES})})
        require_gives(self.SAMPLED, {"teacher": frozenset(Gives), "another": frozenset()})

    @pytest.mark.parametrize(
        ("objective", "gives", "sentence"),
        [
            (
                FULL,
                {"teacher": frozenset({Gives.SAMPLED_LOGPROBS})},
                "gives sampled_logprobs, and a term needs hidden_",
            ),
            (SAMPLED, {"teacher": frozenset({Gives.HIDDEN_STATES})}, "gives hidden_states, and a term needs sampled_l"),
            (FULL, {"teacher": frozenset()}, "gives nothing, and a term needs hidden_states from it; choose"),
            (FULL, {}, "teacher 'teacher' gives nothing"),
        ],
    )
    def test_too_little_is_refused_with_both_sides_named(
        self, objective: Objective, gives: dict[str, frozenset[Gives]], sentence: str
    ) -> None:
        with pytest.raises(PairError, match=sentence):
            require_gives(objective, gives)


class TestWeights:
    def test_special_tokens_but_for_the_end_of_an_answer(self, settings: dict[str, Any]) -> None:
        """<pad> 0, <s> 1, </s> 2 and <unk> 3; w1 is 8, an ordinary word whatever it ends."""
        changes = ["terms.0.train_special=false", 'sampler.stop=["w1"]']
        (term,) = made(settings, *changes).objective.terms
        assert term.left_out_ids == {0, 1, 3}
        (term,) = made(settings).objective.terms
        assert term.left_out_ids == frozenset()

    def test_nothing_special_but_ends(self, settings: dict[str, Any]) -> None:
        recipe = load_recipe(settings, ["terms.0.train_special=false", 'sampler.stop=["<pad>", "<s>", "<unk>"]'])
        assert [line for line in read_data(recipe).warnings if line.startswith("train_special = false leaves nothing")]

    def test_the_verifier_routes_what_the_student_wrote(self, settings: dict[str, Any]) -> None:
        parts = made(settings | {"method": "scope"}, "sampler.samples_per_prompt=2", "train.prompts_per_round=3")
        parts = replace(parts, reward=lambda rollout: float(rollout.prompt.row != 3))
        rows, _ = gather(parts, State(), number=0)
        for row in rows:
            assert row.weights is not None
            on_wrong, on_right = (bool(weights.any()) for weights in row.weights)
            assert (on_wrong, on_right) == (row.rollout.prompt.row == 3, row.rollout.prompt.row != 3)
        firsts = {row.rollout.prompt.row: row.weights.max().item() for row in rows if row.weights is not None}
        assert [firsts[0] + firsts[1], firsts[2], firsts[3], firsts[4] + firsts[5]] == pytest.approx([2, 1, 1, 2])


class TestRewards:
    def test_the_verifier_judges_what_was_written(self, settings: dict[str, Any]) -> None:
        grpo = {"method": "grpo", **{key: table for key, table in settings.items() if key != "teacher"}}
        parts = made(grpo, "sampler.samples_per_prompt=2", "train.prompts_per_round=3")
        assert parts.teachers == {}
        assert parts.reward is not None
        [prompt, *_] = parts.prompts(0)
        words = prompt.example["answer"]
        right, wrong = (word_tokenizer().encode(text) for text in (f"{words} </s>", f"{words} w1 </s>"))
        assert parts.reward(rollout_to(prompt, right)) == 1.0
        assert parts.reward(rollout_to(prompt, wrong)) == 0.0
        rows, _ = gather(parts, State(), number=0)
        assert [row.rollout.prompt.group for row in rows] == [0, 0, 1, 1, 2, 2]
        assert all(row.reward == parts.reward(row.rollout) and row.scores == {} for row in rows)

    def test_nobody_is_judged_in_vain(self, settings: dict[str, Any]) -> None:
        rows, _ = gather(made(settings), State(), number=0)
        assert {row.reward for row in rows} == {None}


class TestWriters:
    @pytest.mark.parametrize(
        ("changes", "kind", "source"),
        [
            ([], InProcessSampler, Source.STUDENT),
            (["sampler.student_fraction=0"], DatasetSampler, None),
            (["sampler.student_fraction=0", "sampler.other=teacher"], InProcessSampler, Source.TEACHER),
        ],
    )
    def test_one_writer_alone(
        self, settings: dict[str, Any], changes: list[str], kind: type[AbstractSampler], source: Source | None
    ) -> None:
        sampler = made(settings, *changes).sampler
        assert type(sampler) is kind
        assert getattr(sampler, "source", None) is source

    @pytest.mark.parametrize(("other", "kind"), [("dataset", DatasetSampler), ("teacher", InProcessSampler)])
    def test_a_mixture(self, settings: dict[str, Any], other: str, kind: type[AbstractSampler]) -> None:
        sampler = made(settings, "sampler.student_fraction=0.3", f"sampler.other={other}").sampler
        assert isinstance(sampler, MixtureSampler)
        assert sampler.student_fraction == 0.3
        assert isinstance(sampler.student, InProcessSampler)
        assert type(sampler.other) is kind

    def test_replay(self, settings: dict[str, Any]) -> None:
        """Of four prompts twice, so eight rows a round: a store of 20 keeps two earlier rows of each place."""
        changes = ["sampler.replay_fraction=0.5", "sampler.replay_capacity=20", "sampler.samples_per_prompt=2"]
        sampler = made(settings, *changes, "sampler.max_age=3", "sampler.mix=batch").sampler
        assert isinstance(sampler, ReplaySampler)
        assert isinstance(sampler.student, InProcessSampler)
        assert (sampler.replay_fraction, sampler.rows_kept, sampler.max_age, sampler.mix) == (0.5, 2, 3, "batch")

    def test_the_students_share_by_the_evaluations(self, settings: dict[str, Any]) -> None:
        recipe = load_recipe(settings | {"method": "distillm"}, ["evaluation.every=2"])
        sampler = built(recipe).sampler
        assert isinstance(sampler, MixtureSampler)
        assert sampler.adaptive == AdaptiveFraction(0.0, rise=0.1, tolerance=0.1)
        assert isinstance(sampler.student, ReplaySampler)
        assert (sampler.student.rows_kept, sampler.student.mix, sampler.mix) == (250, "batch", "batch")
        assert isinstance(sampler.other, DatasetSampler)

    def test_the_settings_of_the_recipe_and_the_students_own_for_evaluation(self, settings: dict[str, Any]) -> None:
        changes = ["sampler.temperature=0.7", "sampler.top_p=0.9", "sampler.top_k=5", "sampler.max_new_tokens=3"]
        parts = made(settings, *changes, 'sampler.stop=["w1"]')
        assert isinstance(parts.sampler, InProcessSampler)
        assert parts.sampler.settings == SamplingSettings(0.7, 0.9, 5, 3, (2, 8))
        assert parts.saver.info["sampling"] == parts.sampler.settings.describe()
        evaluation = parts.evaluation
        assert evaluation is not None
        assert isinstance(evaluation.sampler, InProcessSampler)
        assert isinstance(evaluation.greedy_sampler, InProcessSampler)
        assert evaluation.sampler.settings == SamplingSettings(1.0, 1.0, 0, 3, (2, 8))
        assert evaluation.greedy_sampler.settings == SamplingSettings(0.0, 1.0, 0, 3, (2, 8))

    @pytest.mark.parametrize("writers", [{}, {"student_fraction": 0.0, "other": "teacher"}])
    def test_rows_written_side_by_side(
        self, settings: dict[str, Any], writers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decoded: list[int] = []
        decoding = TransformersBackbone.decoding

        def counted(self: TransformersBackbone, prompt_ids: Sequence[Tensor]) -> AbstractDecoding:
            decoded.append(len(prompt_ids))
            return decoding(self, prompt_ids)

        monkeypatch.setattr(TransformersBackbone, "decoding", counted)
        parts = made(settings | {"sampler": settings["sampler"] | writers}, "sampler.rows_per_batch=2")
        parts.sampler.sample(parts.prompts(0)[:3], Key(0, "sample", 0, 0))
        assert decoded == [2, 1]

    def test_nobody_writes_greedily_without_a_verifier(self, settings: dict[str, Any]) -> None:
        for changes in (["data.verifier="], ["evaluation.greedy=false"]):
            evaluation = made(settings, *changes).evaluation
            assert evaluation is not None
            assert evaluation.greedy_sampler is None


class TestGenerationSettingsOfTheFolder:
    """Case 21: what a model folder says about sampling has no way in."""

    HOSTILE = {  # noqa: RUF012
        "temperature": 0.1,
        "top_k": 1,
        "top_p": 0.001,
        "do_sample": True,
        "repetition_penalty": 1.3,
        "min_new_tokens": 5,
        "suppress_tokens": [7],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    def test_the_same_rows_are_written(self, settings: dict[str, Any], tmp_path: Path) -> None:
        hostile = Path(tiny_folder(tmp_path / "hostile", layers=1))
        (hostile / "generation_config.json").write_text(json.dumps(self.HOSTILE))
        written: list[list[list[int]]] = []
        for model in (settings["student"]["model"], str(hostile)):
            parts = made(settings, f"student.model={model}", "train.prompts_per_round=16")
            rows, _ = gather(parts, State(), number=0)
            written.append([row.rollout.completion_ids.tolist() for row in rows])
        assert written[0] == written[1]
        assert any(7 in row for row in written[0])  # the suppressed id
        assert any(len(row) < 5 for row in written[0])  # fewer than the folder's least number of tokens


class TestStudentAndTeacher:
    def test_the_teacher_is_frozen_and_a_model_of_its_own(self, settings: dict[str, Any]) -> None:
        parts = made(settings, f"teacher.model={settings['student']['model']}")
        teacher: Any = parts.teachers["teacher"]
        assert not any(weight.requires_grad for weight in teacher.backbone.parameters())
        theirs = {weight.data_ptr() for weight in teacher.backbone.parameters()}
        assert not theirs & {weight.data_ptr() for weight in parts.student.backbone.parameters()}

    @pytest.mark.parametrize("dropout", [False, True])
    def test_a_student_that_is_its_teacher(self, tmp_path: Path, dropout: bool) -> None:
        """Case 22: a folder whose dropout rates are 0.5, as student and as teacher."""
        settings = tiny_recipe(tmp_path, "gpt2")
        config = tmp_path / "student" / "config.json"
        rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.5)
        config.write_text(json.dumps(json.loads(config.read_text()) | rates))
        parts = made(
            settings, f"teacher.model={settings['student']['model']}", f"student.dropout={str(dropout).lower()}"
        )
        assert parts.evaluation is not None
        assert abs(parts.evaluation.run(parts.student, 0).metrics["heldout/reverse_kl"]) < 1e-7
        rows, num_rows = gather(parts, State(), number=0)
        [report] = parts.learner.learn(rows, 0, num_rows)
        assert (abs(report.metrics["divergence/reverse_kl"]) > 1e-3) == dropout
        if not dropout:
            assert abs(report.metrics["divergence/reverse_kl"]) < 1e-7
            assert report.metrics["sampler/logprob_gap"] < 1e-5

    def test_adapters_alone_are_trained_and_begin_by_the_seed(self, settings: dict[str, Any]) -> None:
        lora = ["student.lora.rank=2", "student.lora.alpha=4"]
        first, again, other = (made(settings, *lora, f"seed={seed}").student for seed in (0, 0, 1))
        names = first.trainable_parameters().keys()
        assert names
        assert all(".lora_" in name for name in names)

        def begun(student: Any) -> list[Tensor]:
            return [weight for name, weight in student.trainable_parameters().items() if ".lora_A" in name]

        assert all(mine.equal(its) for mine, its in zip(begun(first), begun(again), strict=True))
        assert not any(mine.equal(its) for mine, its in zip(begun(first), begun(other), strict=True))

    def test_layers_that_are_kept(self, settings: dict[str, Any], tmp_path: Path) -> None:
        model = tiny_folder(tmp_path, layers=3)
        parts = made(settings, f"student.model={model}", "student.keep_layers=[0, 2]")
        layers = {name.split(".")[3] for name in parts.student.trainable_parameters() if ".layers." in name}
        assert layers == {"0", "1"}

    def test_the_optimiser_is_as_the_recipe_says(self, settings: dict[str, Any]) -> None:
        changes = {"learning_rate": 0.5, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-4, "weight_decay": 0.3}
        learner = made(settings, *(f"optim.{key}={value}" for key, value in changes.items())).learner
        assert isinstance(learner.optimizer, torch.optim.AdamW)
        [group] = learner.optimizer.param_groups
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.8, 0.9), 1e-4, 0.3)
        assert [id(w) for w in group["params"]] == [id(w) for w in learner.student.trainable_parameters().values()]
        # linear from 1 to a tenth over four steps, by default
        assert [learner.rate(step) for step in range(4)] == pytest.approx([1.0, 0.7, 0.4, 0.1])

    def test_precisions_and_budgets(self, settings: dict[str, Any]) -> None:
        parts = made(settings, "sampler.dtype=bfloat16", "teacher.dtype=bfloat16", "train.tokens_per_micro_batch=77")
        teacher: Any = parts.teachers["teacher"]
        assert {weight.dtype for weight in teacher.backbone.parameters()} == {torch.bfloat16}
        assert {weight.dtype for weight in parts.student.backbone.parameters()} == {torch.float32}
        [rollout] = parts.sampler.sample(parts.prompts(0)[:1], Key(0, "sample", 0, 0))
        [logprobs] = parts.student.logprobs([rollout], 1.0)
        assert rollout.raw_logprobs is not None
        assert 0 < (logprobs - rollout.raw_logprobs).abs().max() < 0.2  # the copy that writes is a coarser one
        assert parts.learner.tokens_per_micro_batch == teacher.tokens_per_batch == 77

    def test_without_a_teacher(self, settings: dict[str, Any]) -> None:
        alone = {key: value for key, value in settings.items() if key != "teacher"} | {"terms": [GOLD_TERM]}
        parts = made(alone, "sampler.student_fraction=0.0")
        assert parts.teachers == {}
        assert parts.evaluation is not None
        assert parts.evaluation.teacher is None


NEAR = {"name": "near", "teacher": "reference", "coefficient": 0.1}


class TestReference:
    def test_it_is_made_only_where_a_term_asks(self, settings: dict[str, Any]) -> None:
        assert set(made(settings).teachers) == {"teacher"}
        assert set(made(settings | {"terms": [{"extrapolation": 1.0}]}).teachers) == {"teacher"}
        assert set(made(settings | {"terms": [{"extrapolation": 1.25}]}).teachers) == {"teacher", "reference"}
        alone = {key: value for key, value in settings.items() if key != "teacher"}
        parts = made(alone | {"terms": [NEAR]})
        assert set(parts.teachers) == {"reference"}
        assert parts.evaluation is not None
        assert parts.evaluation.teacher is None

    def test_left_out_it_is_the_student_as_it_begins(self, settings: dict[str, Any], tmp_path: Path) -> None:
        """Shortened like it, frozen, and no module in common."""
        model = tiny_folder(tmp_path, layers=3)
        changes = [f"student.model={model}", "student.keep_layers=[0, 2]"]
        parts = made(settings | {"terms": [{}, NEAR]}, *changes)
        reference: Any = parts.teachers["reference"]
        weights = dict(reference.backbone.named_parameters())
        assert not any(weight.requires_grad for weight in weights.values())
        for name, weight in parts.student.trainable_parameters().items():
            assert weights[name].equal(weight)
            assert weights[name].data_ptr() != weight.data_ptr()
        assert reference.tokens_per_batch == parts.learner.tokens_per_micro_batch

    @pytest.mark.parametrize("changes", [[], ["student.lora.rank=2", "student.lora.alpha=4"]])
    def test_before_the_first_step_nothing_separates_them(self, settings: dict[str, Any], changes: list[str]) -> None:
        parts = made(settings | {"terms": [NEAR]}, *changes, "optim.learning_rate=0.1")
        divergences = list[float]()
        for number in range(2):
            rows, num_rows = gather(parts, State(step=number), number=number)
            [report] = parts.learner.learn(rows, number, num_rows)
            divergences.append(report.metrics["divergence/near"])
            with torch.no_grad():  # its own gradient is zero: move the student by hand
                for weight in parts.student.trainable_parameters().values():
                    weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
        assert abs(divergences[0]) < 1e-7
        assert divergences[1] > 1e-3

    def test_one_of_its_own(self, settings: dict[str, Any]) -> None:
        changes = [f"reference.model={settings['teacher']['model']}", "reference.dtype=bfloat16"]
        parts = made(settings | {"terms": [NEAR]}, *changes)
        reference: Any = parts.teachers["reference"]
        assert {weight.dtype for weight in reference.backbone.parameters()} == {torch.bfloat16}
        plain = made(settings | {"terms": [NEAR]}, changes[0]).teachers
        theirs, ours = (dict(plain[name].backbone.named_parameters()) for name in ("teacher", "reference"))  # pyright: ignore
        assert all(ours[name].equal(weight) for name, weight in theirs.items())


class TestRefusals:
    @pytest.fixture
    def nothing_loads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            pytest.fail("weights were loaded")

        monkeypatch.setattr("etude.recipes.build.load_backbone", fail)

    @pytest.mark.parametrize(
        ("changes", "error", "sentence"),
        [
            (["device.device=cuda"], RecipeError, "is not available here"),
            (["student.compute_dtype=float16"], RecipeError, "needs a CUDA card"),
            (["sampler.max_new_tokens=64"], DataError, "context window of 64"),
            (["data.prompts=nowhere.jsonl"], DataError, "nowhere.jsonl: cannot be read"),
            (["data.verifier=eaxct"], DataError, "data.verifier names 'eaxct'"),
            (["student.model=./nowhere"], ModelError, "there is no folder"),
            (["teacher.model=./nowhere"], ModelError, "there is no folder"),
            (['sampler.stop=["nonsense"]'], ModelError, "sampler.stop names 'nonsense'"),
        ],
    )
    def test_before_any_weight_is_loaded(
        self,
        settings: dict[str, Any],
        nothing_loads: None,
        monkeypatch: pytest.MonkeyPatch,
        changes: list[str],
        error: type[Exception],
        sentence: str,
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(error, match=sentence):
            made(settings, *changes)

    def test_more_ids_than_the_vocabulary_has(self, settings: dict[str, Any], nothing_loads: None) -> None:
        """Of 32: the default of 64 is refused like any other number."""
        kept = {"support": "top_k", "owner": "union"}
        sentence = (
            r'terms\.1 \("kept"\) has top_k = 64 and the vocabulary 32 ids; lower top_k, or write support = "full"'
        )
        for door in (made, readable):
            with pytest.raises(RecipeError, match=sentence):
                door(settings | {"terms": [{}, kept | {"name": "kept"}]})
        readable(settings | {"terms": [kept | {"top_k": 32}]})

    def test_two_tokenizers(self, settings: dict[str, Any], nothing_loads: None, tmp_path: Path) -> None:
        with pytest.raises(PairError, match="speak different token ids"):
            made(settings, f"teacher.model={tiny_folder(tmp_path, tokenizer=word_tokenizer(24))}")

    def test_the_tokenizer_of_the_reference(
        self, settings: dict[str, Any], nothing_loads: None, tmp_path: Path
    ) -> None:
        other = f"reference.model={tiny_folder(tmp_path, tokenizer=word_tokenizer(24))}"
        with pytest.raises(PairError, match="student and reference speak different token ids"):
            made(settings | {"terms": [NEAR]}, other)
        with pytest.raises(DataError, match="the reference's context window of 7"):
            made(settings | {"terms": [NEAR]}, f"reference.model={tiny_folder(tmp_path / 'short', window=7)}")

    def test_fewer_rows_than_processes(self, settings: dict[str, Any], nothing_loads: None) -> None:
        recipe = load_recipe(settings, ["train.prompts_per_round=2", "sampler.samples_per_prompt=2"])
        with pytest.raises(RecipeError, match="a round has 4 rows .* too few for 5 processes"):
            built(recipe, World(rank=0, size=5, local_rank=0))
