"""What a stage takes over, what it says itself, and what it is refused for; the run of one is tested elsewhere."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from etude.config.load import dump_toml, explain, load_recipe, verdicts
from etude.config.methods import METHODS
from etude.config.schema import Recipe
from etude.config.stages import HOW_WRITTEN, SOURCES_OF_PROMPTS
from etude.config.tables.data import DataConfig
from etude.config.tables.sampler import SamplerConfig
from etude.errors import LegalityError, RecipeError

LEAST: Mapping[str, Any] = {"student": {"model": "s"}, "teacher": {"model": "t"}, "data": {"prompts": "/p.jsonl"}}
TWO = [{"method": "supervised-kd", "train": {"steps": 3}}, {"name": "on-policy"}]


def stages_of(*stages: Mapping[str, Any], **tables: Any) -> tuple[Recipe, ...]:
    return load_recipe({**LEAST, **tables, "stages": list(stages)}).stage_recipes


def test_a_recipe_without_stages_is_its_only_one():
    recipe = load_recipe(LEAST)
    assert recipe.stages is None
    assert recipe.stage_recipes == (recipe,)
    assert "stages" not in dump_toml(recipe)


def test_what_a_stage_says_and_what_it_takes_over():
    first, second = stages_of(*TWO, seed=7, optim={"learning_rate": 1e-3}, train={"steps": 9}, output="runs/x")
    assert (first.name, first.output) == ("1-supervised-kd", "runs/x/1-supervised-kd")
    assert (second.name, second.output) == ("2-on-policy", "runs/x/2-on-policy")
    assert (first.train.steps, second.train.steps) == (3, 9)
    assert (first.sampler.student_fraction, second.sampler.student_fraction) == (0.0, 1.0)
    assert (first.terms[0].divergence, second.terms[0].divergence) == ("forward_kl", "reverse_kl")
    assert {(stage.seed, stage.optim.learning_rate, stage.student.model) for stage in (first, second)} == {
        (7, 1e-3, "s")
    }
    assert (first.stages, second.stages) == (None, None)


def test_terms_replace_the_recipes_and_are_not_merged_with_them():
    terms = [{"support": "top_k", "coefficient": 2.0}, {"name": "more", "divergence": "forward_kl"}]
    same, other = stages_of({}, {"terms": [{"divergence": "jsd"}]}, terms=terms)
    assert [term.name for term in same.terms] == ["reverse_kl", "more"]
    assert [(term.name, term.support, term.coefficient) for term in other.terms] == [("jsd", "full", 1.0)]


def test_a_method_says_who_writes_and_what_is_learned_and_the_rest_stays():
    sampler = {"student_fraction": 0.5, "other": "teacher", "mix": "batch", "temperature": 0.7}
    terms = [{"name": "a"}, {"name": "b"}]
    (stage,) = stages_of({"method": "sft"}, sampler=sampler, terms=terms, optim={"learning_rate": 1e-3})
    assert (stage.sampler.student_fraction, stage.sampler.other, stage.sampler.mix) == (0.0, "dataset", "row")
    assert [(term.name, term.teacher) for term in stage.terms] == [("forward_kl", "label")]
    assert (stage.sampler.temperature, stage.optim.learning_rate) == (0.7, 1e-3)


def test_a_stages_own_words_are_stronger_than_its_method():
    (stage,) = stages_of({"method": "gkd", "sampler": {"student_fraction": 0.25}, "terms": [{"beta": 0.1}]})
    assert stage.sampler.student_fraction == 0.25
    assert (stage.terms[0].divergence, stage.terms[0].beta) == ("jsd", 0.1)


def test_nothing_of_the_recipes_method_is_left_in_a_stage_with_another():
    same, other = stages_of({}, {"method": "opd"}, method="minillm")
    assert (same.train.epochs, same.sampler.teacher_share, len(same.terms)) == (4, 0.2, 2)
    assert (other.train.epochs, other.sampler.teacher_share, len(other.terms)) == (1, None, 1)


def test_what_would_do_nothing_in_a_stage_steps_back_if_it_is_the_recipes():
    sampler = {"student_fraction": 0.5, "other": "teacher", "mix": "batch"}
    mixed, alone = stages_of({}, {"sampler": {"student_fraction": 1.0}}, sampler=sampler)
    assert (mixed.sampler.other, mixed.sampler.mix) == ("teacher", "batch")
    assert (alone.sampler.other, alone.sampler.mix) == (None, "row")


def test_what_would_do_nothing_in_a_stage_is_refused_if_the_stage_says_it():
    with pytest.raises(RecipeError) as caught:
        stages_of({}, {"sampler": {"student_fraction": 1.0, "other": "teacher"}})
    assert str(caught.value).startswith(
        'recipe: stages.1: sampler: other = "teacher" does nothing here, it counts only'
    )


def test_prompts_of_its_own_replace_the_recipes_and_leave_the_held_out_ones():
    data = {"prompts": "/p.jsonl", "eval_prompts": "/held-out.jsonl", "max_prompt_tokens": 99}
    other, task = stages_of({"data": {"prompts": "/q.jsonl"}}, {"data": {"task": "maze"}}, data=data)
    assert (other.data.prompts, other.data.eval_prompts) == ("/q.jsonl", "/held-out.jsonl")
    assert (task.data.prompts, task.data.eval_prompts, task.data.task) == (None, None, "maze")
    assert other.data.max_prompt_tokens == task.data.max_prompt_tokens == 99


def test_defaults_are_those_of_the_stage():
    """final_fraction is 1 under a constant schedule and 0.1 under a linear one, unless somebody says it."""
    same, linear = stages_of({}, {"optim": {"schedule": "linear"}}, optim={"schedule": "constant"})
    assert (same.optim.final_fraction, linear.optim.final_fraction) == (1.0, 0.1)


def test_the_recipe_itself_need_not_be_sound_if_its_stages_are():
    settings = {key: LEAST[key] for key in ("student", "data")} | {
        "stages": [{"method": "sft"}, {"teacher": {"model": "t"}}]
    }
    first, second = load_recipe(settings).stage_recipes
    assert first.teacher is None
    assert second.teacher is not None


def test_paths_start_where_the_stage_stands_and_texts_need_no_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "recipes").mkdir()
    text = 'student.model = "s"\nteacher.model = "t"\ndata.prompts = "p.jsonl"\n[[stages]]\ndata.prompts = "q.jsonl"\n'
    (tmp_path / "recipes/mine.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("recipes/mine.toml", ["stages.0.name=1.5", "stages.1.data.prompts=r.jsonl"])
    first, second = recipe.stage_recipes
    assert first.name == "1-1.5"
    assert first.data.prompts == str(tmp_path / "recipes/q.jsonl")
    assert second.data.prompts == str(tmp_path / "r.jsonl")


def test_overrides_of_a_stage():
    changes = ["stages.0.train.steps=", "stages.1.optim.learning_rate=1e-3", "stages.2.method=gkd"]
    first, second, third = load_recipe({**LEAST, "train": {"steps": 9}, "stages": TWO}, changes).stage_recipes
    assert (first.train.steps, second.optim.learning_rate, third.method) == (9, 1e-3, "gkd")


def test_verdicts_of_every_stage():
    assert list(verdicts(load_recipe({**LEAST, "stages": TWO}))) == [
        "1-supervised-kd/forward_kl",
        "2-on-policy/reverse_kl",
    ]


@pytest.mark.parametrize("outer", [None, *METHODS])
def test_recipes_and_their_stages_survive_a_dump(outer: str | None):
    """Written out whole, a stage has everything twice: what it took over must neither come back nor get lost."""
    settings = {**LEAST, "sampler": {"temperature": 0.9, "top_p": 1.0}, "optim": {"schedule": "constant"}}
    settings["data"] = {**LEAST["data"], "verifier": "exact"}  # for those that train on a reward
    settings |= {"method": outer} if outer else {}
    rows = {"sources": ["student", "dataset", "teacher"]}
    own = {"terms": [{"divergence": "jsd", **rows}], "data": {"task": "maze"}, "optim": {"schedule": "linear"}}
    methods = [{"method": inner} for inner in METHODS]
    recipe = load_recipe({**settings, "stages": [own, *methods]})
    assert load_recipe(tomllib.loads(dump_toml(recipe))) == recipe
    for stage in recipe.stage_recipes:
        assert load_recipe(tomllib.loads(dump_toml(stage))) == stage


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "stages.0.optim.learning_rat=1",
            "stages.0: unknown key optim.learning_rat; did you mean optim.learning_rate?",
        ),
        ("stages.1.train.steps=x", 'stages.1: train.steps: found "x" (text), expected a whole number'),
        (
            "stages.1.student.dropout=true",
            "stages.1: student is the same in all stages; write it outside of [[stages]]",
        ),
        ("stages.1.seed=1", "stages.1: seed is the same in all stages"),
        ("stages.0.method=gdk", 'stages.0: unknown method "gdk"; did you mean gkd?'),
        ('stages.1.name="../x"', 'stages.1: name: found "../x" (text), expected letters, digits'),
        ("stages.1.terms.0.sources=['teacher']", 'stages.1: terms.0: sources = ["teacher"] trains nothing'),
        ("stages=3", "stages: found 3 (a whole number), expected a list"),
        ("stages=[]", "stages: found [] (a list), expected at least 1 entry"),
        ("stages=[1]", "stages.0: found 1 (a whole number), expected a table"),
        ("stages.warm-up.train.steps=1", "stages: found a table, expected a list"),
        ("train.stepz=1", "unknown key train.stepz; did you mean train.steps?"),  # once, not in each stage
    ],
)
def test_complaints_name_the_stage(override: str, says: str):
    settings = {**LEAST, "stages": TWO} if "warm" not in override else LEAST
    with pytest.raises(RecipeError) as caught:
        load_recipe(settings, [override])
    found = str(caught.value).partition(": ")
    assert found[0] in ("command line", "recipe")
    assert found[2].startswith(says)


def test_a_gap_among_the_stages():
    with pytest.raises(
        RecipeError, match=r"^stages: found place 0, 1, 3 of the array; expected 0, 1, ... without a gap"
    ):
        load_recipe({**LEAST, "stages": TWO}, ["stages.3.train.steps=1"])


def test_a_term_without_a_gradient_in_a_stage():
    with pytest.raises(LegalityError, match=r'^recipe: stages.1: terms.0 \("reverse_kl"\) is refused \(k1-loss\)'):
        stages_of({}, {"terms": [{"support": "sampled", "form": "k1"}]})


def test_a_change_that_no_stage_takes_over_is_refused():
    stages = [{"train": {"steps": 3}}, {"train": {"steps": 4}}]
    with pytest.raises(RecipeError) as caught:
        load_recipe({**LEAST, "stages": stages}, ["train.steps=9"])
    assert str(caught.value) == (
        "command line: train.steps = 9 does nothing here, each stage has its own or no use for it; "
        "write stages.0.train.steps=... for the first, and so on"
    )
    assert load_recipe({**LEAST, "stages": [*stages, {}]}, ["train.steps=9"]).stage_recipes[2].train.steps == 9


def test_the_keys_named_here_exist():
    assert {key.removeprefix("sampler.") for key in HOW_WRITTEN} < SamplerConfig.model_fields.keys()
    assert {key.removeprefix("data.") for key in SOURCES_OF_PROMPTS} < DataConfig.model_fields.keys()


def test_a_reference_goes_to_the_stages_that_ask_for_it():
    stages = [{"method": "supervised-kd"}, {"method": "exopd"}]
    without, extrapolated = load_recipe(LEAST | {"reference": {"model": "r"}, "stages": stages}).stage_recipes
    assert without.reference is None
    assert extrapolated.reference is not None
    assert extrapolated.reference.model == "r"
    own = load_recipe(LEAST | {"stages": [stages[0], stages[1] | {"reference": {"model": "r"}}]}).stage_recipes
    assert own == (without, extrapolated)
    with pytest.raises(RecipeError, match='stages.0: reference = "r" does nothing here, it counts only when a term'):
        load_recipe(LEAST | {"stages": [stages[0] | {"reference": {"model": "r"}}, stages[1]]})


def test_a_ramp_that_names_no_end_ends_with_its_own_stage():
    """Inherited, of the stage's method, and said by the stage; the recipe's own table keeps the recipe's steps."""
    rising = {"start": 0.0, "end": 1.0}
    settings = {
        **LEAST,
        "sampler": {"student_fraction": rising},
        "train": {"steps": 9},
        "stages": [
            {"train": {"steps": 5}},
            {"method": "prefix", "train": {"steps": 7}},
            {"sampler": {"student_fraction": {**rising, "last": 2}}, "terms": [{"coefficient": rising}]},
        ],
    }
    recipe = load_recipe(settings)
    first, second, third = recipe.stage_recipes
    assert [part.sampler.fraction.last for part in (recipe, first, third)] == [9, 5, 2]
    assert second.terms[0].values()["first_tokens"].last == 7
    assert third.terms[0].values()["coefficient"].last == 9
    assert load_recipe(tomllib.loads(dump_toml(recipe))) == recipe
    origins = {setting.key: setting.origin for setting in explain(settings)}
    assert origins["stages.0.sampler.student_fraction.last"] == "train.steps"
    assert origins["stages.0.sampler.student_fraction.end"] == "the recipe's"
    assert origins["stages.2.sampler.student_fraction.last"] == "recipe"
