from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from etude.axes.legality import Point, Sampling
from etude.axes.names import Divergence, Estimator, Form, Importance, Source
from etude.config.noun import fields_below, noun_within
from etude.config.plain import leaves, nested
from etude.config.schema import Recipe
from etude.config.tables.data import DataConfig
from etude.config.tables.sampler import SamplerConfig
from etude.config.tables.terms import TermConfig
from etude.config.tables.training import OptimConfig

REWARDED = {"teacher": "reward", "support": "sampled", "estimator": "policy_gradient"}
LIVE = {"teacher.model": None, "teacher.weights": "live"}
HORIZON = {"start": 32, "end": 256, "kind": "linear", "last": 100}
LEAST = {"student.model": "s", "teacher.model": "t", "data.prompts": "/p.jsonl"}


def recipe(changes: dict[str, Any] | None = None) -> Recipe:
    """The smallest recipe, with dotted keys changed; None takes one away."""
    settings = LEAST | dict(leaves(changes or {}))
    return Recipe.model_validate(nested({key: value for key, value in settings.items() if value is not None}))


def term(**fields: Any) -> TermConfig:
    return TermConfig.model_validate(fields)


def test_the_default_recipe_is_on_policy_reverse_kl():
    (only,) = recipe().terms
    assert (only.name, only.teacher, only.support, only.divergence, only.estimator) == (
        "reverse_kl",
        "teacher",
        "full",
        "reverse_kl",
        "analytic",
    )
    assert recipe().sampler.writers == {Source.STUDENT}
    assert recipe().sampling == Sampling()


def test_every_field_says_what_it_is():
    for key, field in fields_below(Recipe):
        assert field.description, key
        assert field.description[0].isupper() or field.description.startswith(("auto", "analytic", "All")), key
        assert field.description.endswith("."), key


def test_defaults_pass_the_schema_themselves():
    assert Recipe.model_validate(recipe().model_dump()) == recipe()


def test_every_table_has_a_docstring():
    tables = {noun for _, field in fields_below(Recipe) if (noun := noun_within(field.annotation))}
    assert all(table.__doc__ for table in tables)


def test_the_parameters_of_a_divergence():
    assert (term(divergence="jsd").beta, term(divergence="jsd").alpha) == (0.5, None)
    assert (term(divergence="skew_reverse_kl").beta, term(divergence="skew_reverse_kl").alpha) == (None, 0.1)
    assert (term().beta, term().alpha) == (None, None)


def test_the_form_follows_the_estimator():
    assert term(support="sampled").form is Form.K2
    assert term(support="sampled", estimator="policy_gradient").form is Form.K1
    assert term().form is None


def test_the_parameters_of_the_policy_gradient():
    analytic, gradient = term(), term(support="sampled", estimator="policy_gradient")
    assert (analytic.discount, analytic.importance, analytic.clip) == (0.0, Importance.NONE, None)
    assert (gradient.discount, gradient.importance, gradient.clip) == (0.0, Importance.RATIO, None)
    assert term(support="sampled", estimator="policy_gradient", importance="ppo_clip").clip == 0.2


def test_a_terms_name_is_its_divergence_unless_it_has_one():
    assert term(divergence="jsd").name == "jsd"
    assert term(divergence="jsd", name="mine").name == "mine"
    assert term(teacher="reward", support="sampled", estimator="policy_gradient").name == "reward"


def test_a_reward_comes_at_the_end_and_counts_for_every_token():
    judged = term(teacher="reward", support="sampled", estimator="policy_gradient")
    assert (judged.discount, judged.importance, judged.form) == (1.0, Importance.RATIO, None)
    assert term(teacher="reward", support="sampled", estimator="policy_gradient", discount=0.9).discount == 0.9


def test_a_term_is_what_the_legality_table_takes():
    point = Point.of(term(support="sampled", sources=["student"]), recipe().sampling, loss_temperature=2.0)
    assert (point.support, point.divergence, point.estimator) == ("sampled", Divergence.REVERSE_KL, Estimator.ANALYTIC)
    assert (point.form, point.loss_temperature, point.sampling.rows) == (Form.K2, 2.0, {Source.STUDENT})


def test_sampling_is_gathered_from_the_tables():
    changes = {
        "sampler": {"student_fraction": 0.5, "other": "teacher", "temperature": 0.7, "top_p": 0.9, "top_k": 5},
        "train": {"updates_per_round": 2, "epochs": 3},
    }
    assert recipe(changes).sampling == Sampling(
        rows=frozenset({Source.STUDENT, Source.TEACHER}), temperature=0.7, top_p=0.9, top_k=5, steps_per_round=6
    )


@pytest.mark.parametrize(
    ("fraction", "other", "writers"),
    [
        (1.0, None, {Source.STUDENT}),
        (0.5, None, {Source.STUDENT, Source.DATASET}),
        (0.5, "teacher", {Source.STUDENT, Source.TEACHER}),
        (0.0, "dataset", {Source.DATASET}),
        (0.0, "teacher", {Source.TEACHER}),
    ],
)
def test_who_writes(fraction: float, other: str | None, writers: set[Source]):
    settings = {"student_fraction": fraction} | ({"other": other} if other else {})
    assert SamplerConfig.model_validate(settings).writers == writers


def test_replay():
    changes = {"sampler": {"replay_fraction": 0.5}, "terms.0.sources": ["student"]}
    assert recipe(changes).sampling == Sampling(stale=True)
    assert (recipe(changes).sampler.replay_capacity, recipe(changes).sampler.max_age) == (1000, None)
    assert (recipe().sampler.replay_capacity, recipe().sampler.max_age) == (None, None)
    assert SamplerConfig.model_validate({"replay_fraction": 0.5, "mix": "batch"}).mix == "batch"
    ramp = {"start": 0.0, "end": 1.0, "last": 100}
    assert SamplerConfig.model_validate({"replay_fraction": ramp}).replay.value(50) == 0.5


def test_an_adaptive_share_begins_at_the_students_fraction():
    sampler = SamplerConfig.model_validate({"student_fraction": 0.0, "adaptive": {}})
    assert sampler.adaptive is not None
    assert (sampler.adaptive.rise, sampler.adaptive.tolerance) == (0.1, 0.1)
    assert (sampler.fraction, sampler.other) == (0.0, Source.DATASET)
    assert sampler.writers == {Source.STUDENT, Source.DATASET}


def test_a_constant_schedule_ends_at_its_peak():
    assert OptimConfig.model_validate({"schedule": "constant"}).final_fraction == 1.0
    assert OptimConfig().final_fraction == 0.1


def test_the_parameters_of_a_source_of_data():
    file, task = DataConfig(prompts="/p"), DataConfig(task="maze")
    dataset = DataConfig(dataset="d")
    assert (file.split, file.task_size, file.eval_task_size) == (None, None, None)
    assert (dataset.split, dataset.task_size) == ("train", None)
    assert (task.split, task.task_size, task.eval_task_size) == (None, 1000, 64)
    assert file.columns == task.columns == {}


def test_name_and_output():
    assert (recipe().name, recipe().output) == ("run", "runs/run")
    assert recipe({"name": "x"}).output == "runs/x"
    assert recipe({"name": "x", "output": "there"}).output == "there"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        # one source of data
        ({"data.prompts": None, "data.verifier": "number"}, "found none of them; expected exactly one of prompts"),
        ({"data.task": "maze"}, "found prompts and task; expected exactly one"),
        ({"data.prompts": None, "data.dataset": "d", "data.eval_dataset": "e"}, 'eval_dataset = "e" needs eval_split'),
        # options that would do nothing
        ({"data.split": "train"}, 'split = "train" does nothing here, it counts only when dataset is given'),
        ({"data.dataset_config": "main"}, "only when dataset is given"),
        ({"data.task_size": 3}, "only when task is given"),
        ({"data.eval_task_size": 3}, "only when task is given"),
        ({"data.eval_prompts": "e", "data.eval_size": 3}, "only when held-out rows are split off"),
        (
            {"data.prompts": None, "data.task": "maze", "data.verifier": "number"},
            "only when prompts come from a file or",
        ),
        (
            {"data.prompts": None, "data.task": "maze", "data.columns.prompt": "q"},
            "only when prompts come from a file or",
        ),
        ({"data.prompts": None, "data.dataset": "d", "data.eval_prompts": "e"}, "only when prompts come from a file;"),
        ({"sampler.other": "teacher"}, 'other = "teacher" does nothing here, it counts only when student_fraction'),
        ({"sampler.student_fraction": 0, "sampler.samples_per_prompt": 2}, "only repeats rows"),
        (
            {"terms.0.renormalise": True},
            'renormalise = true does nothing here, it counts only when support is "sampled"',
        ),
        ({"terms.0.beta": 0.1}, 'beta = 0.1 does nothing here, it counts only when divergence is "jsd"'),
        ({"terms.0.alpha": 0.1}, "only when divergence is a skew one"),
        ({"terms.0.form": "k2"}, 'only when support is "sampled"'),
        ({"terms.0.discount": 0.5}, 'only when estimator is "policy_gradient"'),
        ({"terms.0.importance": "ratio"}, 'only when estimator is "policy_gradient"'),
        ({"terms.0.clip": 0.1}, 'only when importance is "ppo_clip"'),
        ({"terms.0.extrapolation": 1.25, "terms.0.teacher": "reference"}, 'it counts only when teacher is "teacher"'),
        (
            {"terms.0": {"teacher": "label", "divergence": "forward_kl", "confident_wrong_share": 0.1}},
            "confident_wrong_share = 0.1 does nothing here, it counts only when teacher is a model",
        ),
        (
            {"reference.model": "r"},
            'reference = "r" does nothing here, it counts only when a term has teacher = "reference"',
        ),
        ({"optim.schedule": "constant", "optim.final_fraction": 0.1}, "only when schedule is not constant"),
        ({"student.lora.dropout": 0.1}, "lora.dropout = 0.1 does nothing while dropout = false"),
        # settings that contradict each other
        ({"student.keep_layers": [0, 0]}, "names a layer twice or out of order"),
        ({"student.keep_layers": [1, 0]}, "names a layer twice or out of order"),
        ({"terms": [{}, {}]}, 'terms.1: a second term is called "reverse_kl"'),
        ({"terms.0.sources": ["dataset"]}, r'terms.0: sources = ["dataset"] trains nothing, rows come from student'),
        (
            {"teacher.model": None},
            'terms.0 ("reverse_kl") compares the student with a teacher and there is no [teacher]',
        ),
        (
            {
                "teacher.model": None,
                "sampler": {"student_fraction": 0, "other": "teacher"},
                "terms.0": {"teacher": "label", "divergence": "forward_kl"},
            },
            'sampler.other = "teacher" lets the teacher write and there is no [teacher]',
        ),
        ({"teacher.model": None, "teacher.dtype": "auto"}, 'weights = "model" needs the model; write model'),
        (
            {"teacher": {"model": None, "scores": "s", "dtype": "bfloat16"}},
            'dtype = "bfloat16" does nothing here, it counts only when model is given',
        ),
        (
            {"teacher": {"model": None, "scores": "s"}, "sampler.teacher_share": 0.5},
            "let the teacher write with the student and [teacher] has stored scores only; name its model",
        ),
        (
            {"teacher": {"model": None, "scores": "s"}, "sampler": {"student_fraction": 0.5, "other": "teacher"}},
            'sampler.other = "teacher" lets the teacher write and [teacher] has stored scores only',
        ),
        (
            {
                "teacher": {"model": None, "scores": "s"},
                "sampler": {"student_fraction": 0.5, "adaptive": {"rise": 0.1}},
            },
            "follows the held-out divergence from the teacher and [teacher] has stored scores only",
        ),
        (
            {"sampler": {"recorded": "r", "replay_fraction": 0.5}},
            "replay_fraction is about rows that are written, and recorded hands them out; remove one",
        ),
        ({"sampler": {"recorded": "r", "teacher_top_k": 5}}, "teacher_top_k is about rows that are written"),
        (
            {"sampler": {"recorded": "r", "student_fraction": 0.0}},
            "recorded is about the student's rows and there are none; remove it",
        ),
        # whose the teacher's weights are
        ({"teacher": {"weights": "model"}, "teacher.model": None}, 'weights = "model" needs the model'),
        ({"teacher.weights": "bsae"}, '"bsae" is nobody\'s; write "model", "base", "ema", "live" or package'),
        ({"teacher.weights": "live"}, 'model = "t" does nothing here, it counts only when weights = "model"'),
        ({"teacher.ema_rate": 0.1}, 'ema_rate = 0.1 does nothing here, it counts only when weights = "ema"'),
        ({"teacher.options.beta": 1}, "does nothing here, it counts only when weights names a class"),
        (LIVE | {"teacher.step": 3}, 'step = 3 does nothing here, it counts only when weights = "model"'),
        (LIVE | {"teacher.dtype": "bfloat16"}, 'it counts only when model is given, or weights = "ema"'),
        (LIVE | {"teacher.weights": "ema", "teacher.ema_rate": 0}, "greater than 0"),
        (LIVE | {"teacher.weights": "base"}, "the student with its adapters switched off and it has none"),
        (LIVE | {"sampler": {"teacher_share": 0.2}}, 'with teacher.weights = "live" it can only mark'),
        (
            {"teacher.offload": True, "sampler": {"student_fraction": 0.5, "other": "teacher"}},
            "with teacher.offload = true it can only mark",
        ),
        ({"teacher.offload": True, "teacher.device": "cuda:1"}, "says where they stay; remove one of them"),
        ({"teacher.offload": True, "teacher.quantization": "torchao-int8"}, "ties the weights to a device"),
        (
            {"teacher.model": "t.gguf", "teacher.quantization": "bitsandbytes-4bit"},
            "t.gguf is quantised already; remove quantization",
        ),
        ({"student.model": "s.gguf"}, "names its way of splitting text and does not hold it"),
        ({"teacher.device": "gpu"}, '"gpu" is no device; write "auto", "cpu", "mps", "cuda"'),
        ({"terms.0": REWARDED}, 'terms.0 ("reward") trains on a reward and nobody judges the answers; write data.ver'),
        (
            {"terms.0": REWARDED | {"baseline": "group"}, "data.verifier": "exact"},
            'terms.0 ("reward") has baseline = "group" and each prompt is answered once',
        ),
        (
            {
                "terms.0": REWARDED | {"baseline": "group"},
                "data.verifier": "exact",
                "sampler": {"samples_per_prompt": 4, "replay_fraction": 0.5},
            },
            "a replayed answer is one to another question than those around it; write sampler.replay_fraction = 0",
        ),
        ({"terms.0": REWARDED | {"form": "k1"}, "data.verifier": "exact"}, 'teacher is not "reward"'),
        ({"terms.0.extrapolation": 0}, "greater than 0"),
        ({"terms.0.source_weights.student": 0}, "source_weights.student 0.0; expected a number above 0; sources says"),
        (
            {"terms.0.source_weights.teacher": 0.5},
            "terms.0: source_weights.teacher does nothing, rows come from student; remove it",
        ),
        (
            {"terms.0": {"correctness": "right"}},
            'terms.0 ("reverse_kl") asks which rows are right and nobody judges the answers; write data.verifier',
        ),
        ({"terms.0.wrong_weight": 0.5}, "asks which rows are right and nobody judges the answers"),
        (
            {"terms.0": {"correctness": "right", "right_weight": 2.0}, "data.verifier": "exact"},
            "right_weight = 2.0 does nothing here, it counts only when correctness is left out and teacher is not",
        ),
        (
            {"terms.0": REWARDED | {"correctness": "right"}, "data.verifier": "exact"},
            'correctness = "right" does nothing here, it counts only when teacher is not "reward"',
        ),
        (
            {"terms.0.perplexity_temperature": 1.0},
            "perplexity_temperature = 1.0 does nothing here, it counts only when correctness is written",
        ),
        (
            {"terms.0": {"correctness": "right", "perplexity_temperature": 1.0}, "data.verifier": "exact"},
            'terms.0 ("reverse_kl") has a perplexity_temperature and each prompt is answered once',
        ),
        (
            {
                "terms.0": {"correctness": "right", "perplexity_temperature": 1.0},
                "data.verifier": "exact",
                "sampler": {"samples_per_prompt": 4, "replay_fraction": 0.5},
            },
            "has a perplexity_temperature and a replayed answer is one to another question",
        ),
        ({"terms.0.entropy_share": 1}, "less than 1"),
        (
            {"terms.0.first_tokens": 45, "sampler.max_new_tokens": 45},
            "terms.0.first_tokens = 45 does nothing here, it counts only when it is below sampler.max_new_tokens = 45",
        ),
        (
            {"terms.0.first_tokens": HORIZON, "sampler.max_new_tokens": 32},
            'terms.0 ("reverse_kl"): first_tokens goes from 32 to 256 and answers end at sampler.max_new_tokens = 32',
        ),
        (
            {"sampler.replay_capacity": 9},
            "replay_capacity = 9 does nothing here, it counts only when replay_fraction is",
        ),
        ({"sampler.max_age": 9}, "max_age = 9 does nothing here, it counts only when replay_fraction is above 0"),
        ({"sampler.mix": "batch"}, "only when student_fraction is below 1 or replay_fraction above 0"),
        ({"sampler.replay_fraction": 1.5}, "replay_fraction goes from 1.5 to 1.5; it is a share"),
        (
            {"sampler.student_fraction": 0, "sampler.replay_fraction": 0.5},
            "replay_fraction is about the student's rows and it writes none",
        ),
        (
            {"sampler.replay_fraction": 0.5, "sampler.replay_capacity": 7},
            "sampler.replay_capacity = 7 does not hold the 8 rows of one round",
        ),
        (
            {"sampler.replay_fraction": 0.5, "sampler.max_age": 3, "train.epochs": 4},
            "sampler.max_age = 3 replays nothing, the round before is 4 steps old",
        ),
        (
            {"sampler.adaptive.rise": 0.1},
            "raises student_fraction, which goes from 1.0 to 1.0; write one number below 1",
        ),
        (
            {"sampler.adaptive.rise": 0.1, "sampler.student_fraction": {"start": 0.0, "end": 0.5, "last": 9}},
            "raises student_fraction, which goes from 0.0 to 0.5; write one number below 1",
        ),
        (
            {
                "teacher.model": None,
                "sampler": {"student_fraction": 0.0, "adaptive": {"rise": 0.1}},
                "terms": [{"teacher": "label", "divergence": "forward_kl", "sources": ["dataset"]}],
            },
            "[sampler.adaptive] follows the held-out divergence from the teacher and there is no [teacher]",
        ),
        (
            {"sampler.student_fraction": 0.0, "sampler.adaptive.rise": 0.1, "evaluation.every": 0},
            "[sampler.adaptive] follows the evaluations and evaluation.every = 0 makes none",
        ),
        ({"train.updates_per_round": 9}, "train.updates_per_round = 9 is more than the 8 rows of a round"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], says: str):
    with pytest.raises(ValidationError) as caught:
        recipe(changes)
    assert any(says in error["msg"] for error in caught.value.errors()), caught.value


def test_a_reward_needs_a_judge_and_no_teacher():
    judges = {"data.verifier": "exact"}, {"data.prompts": None, "data.task": "maze"}
    for judge in judges:
        alone = recipe({"teacher.model": None, "terms.0": REWARDED} | judge)
        assert (alone.teacher, alone.rewarded) == (None, True)
        grouped = {"terms.0": REWARDED | {"baseline": "group"}, "sampler.samples_per_prompt": 2}
        assert recipe(grouped | judge).terms[0].baseline == "group"
    assert not recipe().rewarded


def test_a_verdict_needs_a_judge():
    for term in ({"correctness": "wrong"}, {"right_weight": 2.0}):
        assert recipe({"terms.0": term, "data.verifier": "exact"}).rewarded


def test_weights_by_source_are_those_that_were_written():
    weighed = recipe(
        {
            "terms.0.source_weights": {"student": 2.0, "teacher": 0.5},
            "sampler": {"student_fraction": 0.5, "other": "teacher"},
        }
    )
    assert weighed.terms[0].values()["source_weights"] == {Source.STUDENT: 2.0, Source.TEACHER: 0.5}
    assert recipe().terms[0].values()["source_weights"] == {}


def test_supervised_fine_tuning_needs_no_teacher():
    settings = {"teacher": "label", "divergence": "forward_kl"}
    assert recipe({"teacher.model": None, "sampler.student_fraction": 0, "terms": [settings]}).teacher is None


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, False),
        ({"terms.0.extrapolation": 1.0}, False),
        ({"terms.0.extrapolation": 1.0, "reference.model": "r"}, False),
        ({"terms.0.extrapolation": 1.25}, True),
        ({"terms.0.teacher": "reference"}, True),
        ({"terms.0.teacher": "reference", "teacher.model": None, "reference.model": "r"}, True),
    ],
)
def test_who_asks_the_reference(changes: dict[str, Any], asked: bool):
    """At a power of 1 its table may stay, for the sake of a sweep."""
    assert recipe(changes).asks_reference == asked


def test_recorded_rows_are_an_older_students():
    assert recipe({"sampler.recorded": "r"}).sampling == Sampling(stale=True)


def test_stored_scores_do_without_the_teachers_weights():
    alone = recipe({"teacher": {"model": None, "scores": "s"}})
    assert (alone.has_teacher_model, recipe().has_teacher_model) == (False, True)


def test_whose_weights_the_teacher_has():
    """What is filled in where it counts, and what stays empty where it does not."""
    average = recipe(LIVE | {"teacher.weights": "ema"}).teacher
    assert average is not None
    assert (average.ema_rate, average.ema_every, average.model) == (0.05, 1, None)
    base = recipe(LIVE | {"teacher.weights": "base", "student.lora.rank": 2}).teacher
    assert base is not None
    assert (base.ema_rate, base.ema_every) == (None, None)
    own = recipe(LIVE | {"teacher.weights": "package.module:Class", "teacher.options.beta": 1}).teacher
    assert own is not None
    assert own.options == {"beta": 1}
    for teacher in (average, base, own):
        changed = {"teacher.model": None, "teacher": teacher.model_dump(exclude_none=True), "student.lora.rank": 2}
        assert recipe(changed).teacher == teacher


class TestHorizons:
    def test_one_that_goes_beyond_the_answers_is_told_with_its_numbers(self):
        """32 + 2.24 step is 45, halves upwards, from step 6 on (45.44), so in 194 of 200 steps; 200 is the end's."""
        long = {"terms.0.first_tokens": HORIZON, "sampler.max_new_tokens": 45, "train.steps": 200}
        assert recipe(long).warnings == (
            'terms.0 ("reverse_kl"): first_tokens goes from 32 to 256 and answers end at sampler.max_new_tokens = 45, '
            "so that it leaves nothing out in 194 of 200 steps; 45 is as far as it need go",
        )

    @pytest.mark.parametrize("longest", [256, 300])
    def test_one_that_ends_with_them_is_not(self, longest: int):
        assert recipe({"terms.0.first_tokens": HORIZON, "sampler.max_new_tokens": longest}).warnings == ()

    def test_answers_of_the_data_may_be_longer(self):
        mixed = {"terms.0.first_tokens": 500, "sampler": {"max_new_tokens": 45, "student_fraction": 0.5}}
        assert recipe(mixed).warnings == ()
        own = mixed | {"terms.0.sources": ["student"]}
        with pytest.raises(ValidationError, match="first_tokens = 500 does nothing here"):
            recipe(own)
