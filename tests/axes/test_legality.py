"""The table of combinations: complete, no row in vain, and the same for recipe and notebook."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest

from etude.axes.legality import RULES, Point, Sampling, judge, require_legal
from etude.axes.names import LABEL, Divergence, Estimator, Form, Importance, Source, Support
from etude.core.objective import Objective, Term
from etude.errors import LegalityError

STUDENT, DATASET, TEACHER = Source.STUDENT, Source.DATASET, Source.TEACHER
POLICY = Estimator.POLICY_GRADIENT


def every_point() -> list[Point]:
    """Every combination of the values that the table tells apart."""
    samplings = [
        Sampling(frozenset(rows), temperature, top_p, top_k, steps)
        for rows in ((), (STUDENT,), (DATASET,), (TEACHER,), (STUDENT, DATASET))
        for temperature, top_p, top_k in ((1.0, 1.0, 0), (0.5, 1.0, 0), (0.0, 1.0, 0), (1.0, 0.9, 0), (1.0, 1.0, 5))
        for steps in (1, 2)
    ]
    return [
        Point(label, support, divergence, estimator, form, importance, discount, loss_temperature, sampling)
        for label in (True, False)
        for support in Support
        for divergence in Divergence
        for estimator in Estimator
        for form in (None, *Form)
        for importance in Importance
        for discount in (0.0, 0.5, 1.0)
        for loss_temperature in (1.0, 0.5)
        for sampling in samplings
    ]


def test_every_combination_ends_in_a_rule_and_every_rule_is_reached() -> None:
    """First match decides, so a rule that is never the first to match would be dead."""
    reached = {judge(point).name for point in every_point()}
    assert reached == {rule.name for rule in RULES}


def test_names_are_unique_and_axes_and_values_exist() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    known: dict[str, set[str]] = {}
    for point in every_point():
        for axis, value in point.axes.items():
            known.setdefault(axis, set()).add(value)
    for rule in RULES:
        for axis, values in rule.when.items():
            assert set(values) <= known[axis], f"{rule.name}: {axis}"


def test_a_refusal_says_why_and_what_to_do_instead() -> None:
    for rule in RULES:
        assert rule.reason
        assert not rule.reason.endswith(".")
        if rule.kind == "refused":
            assert rule.cure.startswith("write "), rule.name
        else:
            assert not rule.cure, rule.name


# What is refused ----------------------------------------------------------------------------------------------------

SAMPLED = Point(support=Support.SAMPLED)
GRADIENT = replace(SAMPLED, estimator=POLICY)
GOLD = Point(label=True, divergence=Divergence.FORWARD_KL, sampling=Sampling(frozenset({DATASET})))


def written(point: Point, **sampling: object) -> Point:
    return replace(point, sampling=replace(point.sampling, **sampling))


@pytest.mark.parametrize(
    ("point", "name"),
    [
        (written(Point(), rows=frozenset()), "no-rows"),
        (replace(GOLD, divergence=Divergence.REVERSE_KL), "label-divergence"),
        (replace(GOLD, support=Support.SAMPLED), "label-support"),
        (replace(GOLD, estimator=POLICY), "label-estimator"),
        (written(GOLD, rows=frozenset({STUDENT})), "label-own-rows"),
        (written(GOLD, rows=frozenset({STUDENT, DATASET})), "label-own-rows"),
        (written(GOLD, rows=frozenset({STUDENT}), steps_per_round=4), "label-own-rows"),
        (Point(estimator=POLICY), "state-value-advantage"),
        (replace(SAMPLED, divergence=Divergence.FORWARD_KL), "sampled-divergence"),
        (replace(GRADIENT, divergence=Divergence.JSD), "sampled-divergence"),
        (replace(SAMPLED, form=Form.K1), "k1-loss"),
        (replace(SAMPLED, form=Form.K3), "k3-loss"),
        (replace(GRADIENT, form=Form.K2), "k2-reward"),
        (replace(GRADIENT, form=Form.K3), "k3-reward"),
        (written(SAMPLED, rows=frozenset({DATASET})), "sampled-rows"),
        (written(GRADIENT, rows=frozenset({STUDENT, TEACHER})), "sampled-rows"),
        (written(GRADIENT, top_p=0.95), "truncated-sampling"),
        (written(SAMPLED, top_k=50), "truncated-sampling"),
        (replace(written(GRADIENT, temperature=0.0), importance=Importance.RATIO), "truncated-sampling"),
        (written(SAMPLED, temperature=0.7), "uncorrected-temperature"),
        (replace(GRADIENT, loss_temperature=2.0), "uncorrected-temperature"),
        (written(SAMPLED, steps_per_round=2), "uncorrected-steps"),
        (written(GRADIENT, steps_per_round=2), "uncorrected-steps"),
    ],
)
def test_refused(point: Point, name: str) -> None:
    rule = judge(point)
    assert (rule.name, rule.kind) == (name, "refused")
    with pytest.raises(LegalityError) as refusal:
        require_legal(point, 'terms.0 ("mine")')
    assert str(refusal.value) == f'terms.0 ("mine") is refused ({name}): {rule.reason}; {rule.cure}.'
    assert refusal.value.exit_status == 2


RATIO = replace(GRADIENT, importance=Importance.RATIO)


@pytest.mark.parametrize(
    ("point", "name", "kind"),
    [
        (GOLD, "label", "exact"),
        (written(GOLD, rows=frozenset({STUDENT}), top_p=0.9), "label-shifted-rows", "surrogate"),
        (written(GOLD, rows=frozenset({STUDENT, DATASET}), temperature=1.001), "label-shifted-rows", "surrogate"),
        (written(GOLD, temperature=0.7), "label", "exact"),
        *((Point(divergence=divergence), "full", "exact") for divergence in Divergence),
        (written(Point(), rows=frozenset({STUDENT, DATASET}), top_p=0.9, temperature=0.7), "full", "exact"),
        (SAMPLED, "sampled", "exact"),
        (GRADIENT, "sampled", "exact"),
        (replace(GRADIENT, discount=1.0), "sampled", "exact"),
        (written(RATIO, temperature=0.7), "sampled", "exact"),
        (replace(written(SAMPLED, temperature=0.7), loss_temperature=0.7), "sampled", "exact"),
        (replace(GRADIENT, discount=0.5), "discounted", "surrogate"),
        (replace(GRADIENT, importance=Importance.PPO_CLIP), "ppo-clip", "surrogate"),
        (replace(written(RATIO, temperature=0.7), discount=1.0), "token-ratio-of-returns", "surrogate"),
        (written(RATIO, steps_per_round=4), "advantages-of-the-first-step", "surrogate"),
        (replace(written(RATIO, steps_per_round=4), discount=1.0), "advantages-of-the-first-step", "surrogate"),
    ],
)
def test_legal(point: Point, name: str, kind: str) -> None:
    assert (judge(point).name, judge(point).kind) == (name, kind)
    assert require_legal(point, "here") is judge(point)


def test_the_form_left_open_is_the_right_one() -> None:
    assert (SAMPLED.default_form, GRADIENT.default_form, Point().default_form) == (Form.K2, Form.K1, None)
    assert judge(SAMPLED) is judge(replace(SAMPLED, form=Form.K2))
    assert judge(GRADIENT) is judge(replace(GRADIENT, form=Form.K1))


# The same table for everybody ---------------------------------------------------------------------------------------


@dataclass
class Written:
    """A term as a recipe holds it: no torch, and not the class that `Objective` takes."""

    teacher: str = "teacher"
    support: Support = Support.FULL
    divergence: Divergence = Divergence.REVERSE_KL
    estimator: Estimator = Estimator.ANALYTIC
    form: Form | None = None
    importance: Importance = Importance.NONE
    discount: float = 0.0
    sources: tuple[Source, ...] = field(default=tuple(Source))


def test_a_point_meets_only_the_rows_its_term_trains() -> None:
    sampling = Sampling(frozenset({STUDENT, DATASET}), steps_per_round=3)
    point = Point.of(Written(teacher=LABEL, sources=(DATASET,)), sampling, 2.0)
    assert point == Point(label=True, loss_temperature=2.0, sampling=Sampling(frozenset({DATASET}), steps_per_round=3))
    assert Point.of(Written(sources=(TEACHER,)), sampling, 1.0).sampling.rows == frozenset()


def test_objective_asks_the_same_table() -> None:
    """Every combination that a `Term` can hold: refused with the same sentence, or built with the same verdict."""
    parameters = {Divergence.JSD: {"beta": 0.5}}
    parameters |= {name: {"alpha": 0.1} for name in (Divergence.SKEW_FORWARD_KL, Divergence.SKEW_REVERSE_KL)}
    samplings = [
        Sampling(rows, temperature=temperature, top_k=top_k, steps_per_round=steps)
        for rows in (frozenset({STUDENT}), frozenset({STUDENT, DATASET}))
        for temperature, top_k in ((1.0, 0), (0.5, 0), (1.0, 5))
        for steps in (1, 2)
    ]
    refused = built = 0
    for teacher, support, divergence, estimator in itertools.product(
        ("teacher", LABEL), Support, Divergence, Estimator
    ):
        forms = (None, *Form) if support is Support.SAMPLED else (None,)
        importances = tuple(Importance) if estimator is POLICY else (Importance.NONE,)
        discounts = (0.0, 0.5, 1.0) if estimator is POLICY else (0.0,)
        for form, importance, discount, sources in itertools.product(
            forms, importances, discounts, ((STUDENT,), (DATASET,), (STUDENT, DATASET))
        ):
            term = Term(
                "mine",
                teacher,
                support,
                divergence,
                estimator=estimator,
                form=form,
                discount=discount,
                importance=importance,
                clip=0.2 if importance is Importance.PPO_CLIP else None,
                sources=sources,
                **parameters.get(divergence, {}),
            )
            for sampling in samplings:
                recipe = Written(teacher, support, divergence, estimator, form, importance, discount, sources)
                rule = judge(Point.of(recipe, sampling, 1.0))
                if rule.kind == "refused":
                    with pytest.raises(LegalityError) as refusal:
                        Objective([term], sampling=sampling)
                    assert str(refusal.value) == f"term 'mine' is refused ({rule.name}): {rule.reason}; {rule.cure}."
                    refused += 1
                else:
                    assert Objective([term], sampling=sampling).verdicts == (rule,)
                    built += 1
    assert refused > 1000
    assert built > 200
