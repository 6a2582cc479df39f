from __future__ import annotations

import pytest

from etude.config.load import load_recipe, verdicts
from etude.config.methods import METHODS
from etude.config.plain import leaves

LEAST = {
    "student": {"model": "s"},
    "teacher": {"model": "t"},
    "data": {"prompts": "/p.jsonl", "verifier": "exact"},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_makes_a_legal_recipe_that_says_what_the_row_says(name: str):
    recipe = load_recipe(LEAST | {"method": name})
    written = dict(leaves(recipe.model_dump(mode="json")))
    assert {key: written[key] for key, _ in leaves(METHODS[name].settings)} == dict(leaves(METHODS[name].settings))
    assert len(verdicts(recipe)) == len(METHODS[name].settings["terms"])  # none is refused


@pytest.mark.parametrize("name", METHODS)
def test_a_row_is_complete(name: str):
    method = METHODS[name]
    assert method.axes.keys() == {"sampler", "teacher", "support", "divergence", "estimator", "reduction"}
    assert method.line
    assert method.source


def test_rows_as_published():
    assert METHODS["gkd"].axes["sampler"] == "student 50%, dataset 50%"
    assert METHODS["seqkd"].axes["sampler"] == "teacher"
    assert METHODS["distillm"].axes["sampler"] == "student with replay from 0% up, dataset"
    assert load_recipe(LEAST | {"method": "gkd"}).terms[0].beta == 0.5
    machines = load_recipe(LEAST | {"method": "thinking-machines"})
    assert (machines.terms[0].discount, machines.terms[0].importance, machines.terms[0].form) == (0.0, "ratio", "k1")
    assert machines.sampler.samples_per_prompt == 4


def test_methods_of_two_models_and_of_chosen_tokens():
    beyond = load_recipe(LEAST | {"method": "exopd"})
    (term,) = beyond.terms
    assert (term.extrapolation, term.importance, term.bounds, term.form) == (1.25, "truncated", (0.0, 5.0), "k1")
    assert beyond.reference is None
    (term,) = load_recipe(LEAST | {"method": "tip"}).terms
    assert (term.entropy_share, term.confident_wrong_share, term.support) == (0.5, 0.1, "full")


def test_the_ones_with_a_reward():
    assert METHODS["grpo"].axes["teacher"] == "reward"
    assert METHODS["grpo"].axes["divergence"] == "none"
    assert METHODS["gkd-rl"].axes["teacher"] == "teacher + reward"
    alone = {key: table for key, table in LEAST.items() if key != "teacher"}
    grpo = load_recipe(alone | {"method": "grpo"})
    assert (grpo.teacher, grpo.sampler.samples_per_prompt, grpo.terms[0].discount) == (None, 8, 1.0)
    wrong, right = load_recipe(LEAST | {"method": "scope"}).terms
    assert (wrong.correctness, wrong.divergence, right.correctness, right.teacher) == (
        "wrong",
        "reverse_kl",
        "right",
        "label",
    )
    both = load_recipe(LEAST | {"method": "gkd-rl"})
    assert sum(term.coefficient for term in both.terms) == 1.0  # alpha and 1 - alpha


def test_opd_is_the_default_recipe():
    named = load_recipe(LEAST | {"method": "opd"}).model_dump(exclude={"method"})
    assert named == load_recipe(LEAST).model_dump(exclude={"method"})
