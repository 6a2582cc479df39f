"""The table of combinations: complete, no row in vain, and the same for recipe and notebook."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from etude.axes.legality import RULES, Point, Sampling, judge, reasons, require_legal
from etude.axes.names import (
    LABEL,
    REWARD,
    Baseline,
    Correctness,
    Divergence,
    Estimator,
    Form,
    Importance,
    Reduction,
    Source,
    Support,
    Tail,
)
from etude.core.objective import Objective, Term
from etude.errors import LegalityError

STUDENT, DATASET, TEACHER = Source.STUDENT, Source.DATASET, Source.TEACHER
POLICY = Estimator.POLICY_GRADIENT


def every_sampling() -> list[Sampling]:
    tokens: tuple[dict[str, object], ...] = (
        {},
        {"temperature": 0.5},
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 5},
        {"top_k": 1},
        {"top_k": 5, "temperature": 0.5},
        {"top_p": 0.9, "stale": True},
        {"top_p": 0.9, "joint": True},
        {"joint": True},
        {"joint": True, "temperature": 0.5},
        {"stale": True},
        {"stale": True, "temperature": 0.5},
    )
    return [
        Sampling(frozenset(rows), steps_per_round=steps, **written)
        for rows in ((), (STUDENT,), (DATASET,), (TEACHER,), (STUDENT, DATASET))
        for written in tokens
        for steps in (1, 2)
    ]


def every_point() -> list[Point]:
    """Every combination of the values that the table tells apart and that can meet in one point.

    Whatever belongs to one support or one estimator stays at its default elsewhere; a term refuses to hold it there.
    """
    samplings = every_sampling()
    alike = [
        Point(label=label, support=support, divergence=divergence, estimator=estimator, sampling=sampling)
        for label in (True, False)
        for support in (Support.FULL, Support.SAMPLED)
        for divergence in Divergence
        for estimator in Estimator
        for sampling in samplings
    ]
    detached = [Point(divergence=divergence, detached=True) for divergence in Divergence]
    kept = [
        Point(
            support=Support.TOP_K,
            divergence=divergence,
            estimator=estimator,
            tail=tail,
            one_id=one_id,
            sampling=sampling,
        )
        for divergence in Divergence
        for estimator in Estimator
        for tail in Tail
        for one_id in (True, False)
        for sampling in samplings
    ]
    differentiated = [
        Point(
            support=Support.SAMPLED,
            form=form,
            renormalised=renormalised,
            loss_temperature=loss_temperature,
            sampling=sampling,
        )
        for form in (None, *Form)
        for renormalised in (False, True)
        for loss_temperature in (1.0, 0.5)
        for sampling in samplings
    ]
    chosen = [replace(point, chosen_by_draw=True) for point in (*kept, *differentiated)]
    gated = [
        replace(GRADIENT, chosen_by_state=True, discount=discount, sampling=sampling)
        for discount in (0.0, 0.5, 1.0)
        for sampling in samplings
    ]
    reduced = [
        replace(point, reduction=reduction)
        for point in (*kept, *differentiated)
        for reduction in (Reduction.SEQUENCE_MEAN, Reduction.SUM)
    ]
    verdicts = [replace(point, answers=kind) for point in (*alike, *differentiated) for kind in ("right", "wrong")]
    rewards = [
        replace(point, estimator=POLICY, importance=importance, discount=discount, shaped=shaped)
        for point in differentiated
        for importance in Importance
        for discount in (0.0, 0.5, 1.0)
        for shaped in (True, False)
    ]
    judged = [
        Point(
            reward=True,
            support=support,
            divergence=divergence,
            estimator=estimator,
            importance=importance,
            discount=discount,
            shaped=shaped,
            tail=Tail.BUCKET if support is Support.TOP_K else None,
            renormalised=renormalised,
            sampling=sampling,
        )
        for support in Support
        for renormalised in ((False, True) if support is Support.SAMPLED else (False,))
        for divergence in (Divergence.REVERSE_KL, Divergence.JSD)
        for estimator in Estimator
        for importance in Importance
        for discount in (0.0, 0.5, 1.0)
        for shaped in (True, False)
        for sampling in samplings
    ]
    return [*alike, *detached, *kept, *differentiated, *chosen, *gated, *reduced, *verdicts, *rewards, *judged]


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
WITHIN = replace(GRADIENT, renormalised=True, sampling=Sampling(top_p=0.9))
TOP_K = Point(support=Support.TOP_K, tail=Tail.BUCKET)
TAIL = replace(TOP_K, tail=Tail.SAMPLED)
JUDGED = replace(GRADIENT, reward=True, discount=1.0)
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
        (replace(GOLD, support=Support.TOP_K, tail=Tail.BUCKET), "label-support"),
        (written(replace(GOLD, answers="wrong"), rows=frozenset({STUDENT})), "label-wrong-rows"),
        (written(replace(GOLD, answers="wrong"), rows=frozenset({STUDENT, DATASET}), top_p=0.9), "label-wrong-rows"),
        (written(replace(SAMPLED, answers="right"), top_p=0.9), "truncated-sampling"),
        (written(replace(GRADIENT, answers="wrong"), stale=True), "uncorrected-replay"),
        (replace(JUDGED, divergence=Divergence.JSD), "reward-divergence"),
        (replace(JUDGED, support=Support.FULL), "reward-support"),
        (replace(JUDGED, support=Support.TOP_K, tail=Tail.BUCKET), "reward-support"),
        (replace(JUDGED, estimator=Estimator.ANALYTIC), "reward-estimator"),
        (replace(JUDGED, discount=0.0), "reward-last-token"),
        (written(JUDGED, rows=frozenset({STUDENT, DATASET})), "sampled-rows"),
        (written(JUDGED, top_p=0.95), "truncated-sampling"),
        (written(JUDGED, temperature=0.7), "uncorrected-temperature"),
        (written(JUDGED, joint=True), "uncorrected-joint"),
        (written(JUDGED, steps_per_round=2), "uncorrected-steps"),
        (written(JUDGED, stale=True), "uncorrected-replay"),
        (Point(estimator=POLICY), "state-value-advantage"),
        (replace(TOP_K, estimator=POLICY), "state-value-advantage"),
        (replace(TAIL, estimator=POLICY), "state-value-advantage"),
        (replace(TOP_K, tail=Tail.RENORMALISE, one_id=True), "renormalised-one"),
        (replace(TAIL, divergence=Divergence.FORWARD_KL), "sampled-tail-divergence"),
        (replace(TAIL, divergence=Divergence.ALPHA_BETA), "sampled-tail-divergence"),
        (written(TAIL, rows=frozenset({STUDENT, DATASET})), "sampled-rows"),
        (written(TAIL, top_p=0.95), "truncated-sampling"),
        (written(TAIL, temperature=0.7), "uncorrected-temperature"),
        (written(TAIL, steps_per_round=2), "uncorrected-steps"),
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
        (replace(SAMPLED, renormalised=True), "renormalised-whole"),
        (written(replace(GRADIENT, renormalised=True), joint=True), "renormalised-whole"),
        (written(replace(GRADIENT, renormalised=True), joint=True, top_p=0.9), "truncated-sampling"),
        (written(replace(JUDGED, renormalised=True), top_k=1, top_p=0.9), "renormalised-single"),
        (written(replace(SAMPLED, renormalised=True), temperature=0.0), "renormalised-single"),
        (written(WITHIN, rows=frozenset({STUDENT, DATASET})), "sampled-rows"),
        (written(WITHIN, temperature=0.7), "uncorrected-temperature"),
        (written(WITHIN, steps_per_round=2), "uncorrected-steps"),
        (written(WITHIN, stale=True), "uncorrected-replay"),
        (replace(WITHIN, form=Form.K2), "k2-reward"),
        (written(SAMPLED, temperature=0.7), "uncorrected-temperature"),
        (replace(GRADIENT, loss_temperature=2.0), "uncorrected-temperature"),
        (written(SAMPLED, joint=True), "uncorrected-joint"),
        (written(GRADIENT, joint=True, steps_per_round=2), "uncorrected-joint"),
        (written(TAIL, joint=True), "uncorrected-joint"),
        (written(SAMPLED, steps_per_round=2), "uncorrected-steps"),
        (written(GRADIENT, steps_per_round=2), "uncorrected-steps"),
        (written(SAMPLED, stale=True), "uncorrected-replay"),
        (written(GRADIENT, stale=True), "uncorrected-replay"),
        (written(TAIL, stale=True), "uncorrected-replay"),
        (written(GRADIENT, stale=True, steps_per_round=2), "uncorrected-steps"),
        (written(GRADIENT, stale=True, rows=frozenset({STUDENT, DATASET})), "sampled-rows"),
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
WITHIN_RATIO = replace(WITHIN, importance=Importance.RATIO)


@pytest.mark.parametrize(
    ("point", "name", "kind"),
    [
        (GOLD, "label", "exact"),
        (written(GOLD, rows=frozenset({STUDENT}), top_p=0.9), "label-shifted-rows", "surrogate"),
        (written(GOLD, rows=frozenset({STUDENT, DATASET}), temperature=1.001), "label-shifted-rows", "surrogate"),
        (written(GOLD, temperature=0.7), "label", "exact"),
        (replace(GOLD, answers="wrong"), "label", "exact"),
        (written(replace(GOLD, answers="right"), rows=frozenset({STUDENT})), "label-right-rows", "surrogate"),
        (
            written(replace(GOLD, answers="right"), rows=frozenset({STUDENT}), top_p=0.9),
            "label-right-rows",
            "surrogate",
        ),
        *((replace(Point(), answers=kind), "full", "exact") for kind in ("right", "wrong")),
        *(
            (replace(point, answers=kind), "chosen-by-outcome", "surrogate")
            for point in (SAMPLED, GRADIENT, TAIL, replace(SAMPLED, chosen_by_draw=True))
            for kind in ("right", "wrong")
        ),
        (replace(TOP_K, answers="right"), "bucket", "surrogate"),
        (replace(GRADIENT, answers="right", shaped=True), "shaped-advantages", "surrogate"),
        *((Point(divergence=divergence), "full", "exact") for divergence in Divergence),
        (Point(divergence=Divergence.ADAPTIVE_KL, detached=True), "detached", "surrogate"),
        (Point(divergence=Divergence.SKEW_REVERSE_KL, detached=True), "detached", "surrogate"),
        (TOP_K, "bucket", "surrogate"),
        (replace(TOP_K, one_id=True), "bucket", "surrogate"),
        (replace(TOP_K, divergence=Divergence.ADAPTIVE_KL, detached=True), "bucket", "surrogate"),
        (replace(TOP_K, tail=Tail.TRUNCATE), "truncate", "surrogate"),
        (replace(TOP_K, tail=Tail.RENORMALISE), "renormalise", "surrogate"),
        (written(TOP_K, rows=frozenset({STUDENT, DATASET}), top_p=0.9, steps_per_round=2), "bucket", "surrogate"),
        (TAIL, "sampled-tail", "exact"),
        (replace(TAIL, one_id=True), "sampled-tail", "exact"),
        (written(Point(), rows=frozenset({STUDENT, DATASET}), top_p=0.9, temperature=0.7), "full", "exact"),
        (SAMPLED, "sampled", "exact"),
        (GRADIENT, "sampled", "exact"),
        (WITHIN, "renormalised", "exact"),
        (written(replace(SAMPLED, renormalised=True), top_k=2), "renormalised", "exact"),
        (replace(WITHIN, discount=1.0), "renormalised", "exact"),
        (written(WITHIN_RATIO, temperature=0.7), "renormalised", "exact"),
        (written(replace(JUDGED, renormalised=True), top_p=0.9), "renormalised-reward", "exact"),
        (replace(WITHIN, shaped=True), "shaped-advantages", "surrogate"),
        (replace(WITHIN, chosen_by_draw=True), "chosen-by-draw", "surrogate"),
        (replace(WITHIN, discount=0.5), "discounted", "surrogate"),
        (replace(written(WITHIN_RATIO, temperature=0.7), discount=1.0), "token-ratio-of-returns", "surrogate"),
        (written(WITHIN_RATIO, stale=True), "states-of-an-older-student", "surrogate"),
        (written(WITHIN_RATIO, steps_per_round=2), "advantages-of-the-first-step", "surrogate"),
        (replace(written(WITHIN, stale=True), importance=Importance.PPO_CLIP), "ppo-clip", "surrogate"),
        (replace(GRADIENT, discount=1.0), "sampled", "exact"),
        (written(RATIO, temperature=0.7), "sampled", "exact"),
        (written(RATIO, joint=True), "sampled", "exact"),
        (written(RATIO, joint=True, temperature=0.7), "sampled", "exact"),
        (written(Point(), joint=True), "full", "exact"),
        (written(GOLD, joint=True), "label", "exact"),
        (written(GOLD, rows=frozenset({STUDENT}), joint=True), "label-shifted-rows", "surrogate"),
        (replace(written(SAMPLED, temperature=0.7), loss_temperature=0.7), "sampled", "exact"),
        (replace(GRADIENT, discount=0.5), "discounted", "surrogate"),
        (replace(GRADIENT, importance=Importance.PPO_CLIP), "ppo-clip", "surrogate"),
        (replace(GRADIENT, importance=Importance.TRUNCATED), "bounded-ratio", "surrogate"),
        (replace(written(GRADIENT, temperature=0.7), importance=Importance.MASKED), "bounded-ratio", "surrogate"),
        (replace(SAMPLED, chosen_by_draw=True), "chosen-by-draw", "surrogate"),
        (replace(GRADIENT, chosen_by_draw=True), "chosen-by-draw", "surrogate"),
        (replace(TAIL, chosen_by_draw=True), "chosen-by-draw", "surrogate"),
        (Point(chosen_by_draw=True), "full", "exact"),
        *((replace(point, chosen_by_state=True), "sampled", "exact") for point in (SAMPLED, GRADIENT)),
        (replace(TAIL, chosen_by_state=True), "sampled-tail", "exact"),
        *(
            (replace(GRADIENT, chosen_by_state=True, discount=discount), name, "surrogate")
            for discount, name in ((0.5, "discounted"), (1.0, "returns-of-chosen-states"))
        ),
        (replace(JUDGED, chosen_by_state=True), "returns-of-chosen-states", "surrogate"),
        *(
            (replace(point, reduction=Reduction.SEQUENCE_MEAN), "weighed-by-length", "surrogate")
            for point in (SAMPLED, GRADIENT, TAIL, WITHIN, JUDGED)
        ),
        *((replace(JUDGED, reduction=kind), "reward", "exact") for kind in (Reduction.TOKEN_MEAN, Reduction.SUM)),
        (replace(Point(), reduction=Reduction.SEQUENCE_MEAN), "full", "exact"),
        (replace(GOLD, reduction=Reduction.SEQUENCE_MEAN), "label", "exact"),
        (replace(TOP_K, reduction=Reduction.SEQUENCE_MEAN), "bucket", "surrogate"),
        (replace(GRADIENT, shaped=True), "shaped-advantages", "surrogate"),
        (replace(GRADIENT, shaped=True, discount=0.5), "shaped-advantages", "surrogate"),
        (replace(written(RATIO, temperature=0.7), discount=1.0), "token-ratio-of-returns", "surrogate"),
        (replace(written(RATIO, joint=True), discount=1.0), "token-ratio-of-returns", "surrogate"),
        (written(RATIO, stale=True), "states-of-an-older-student", "surrogate"),
        (replace(written(RATIO, stale=True), discount=1.0), "states-of-an-older-student", "surrogate"),
        (written(RATIO, stale=True, steps_per_round=4), "states-of-an-older-student", "surrogate"),
        (written(RATIO, stale=True, joint=True, temperature=0.7), "states-of-an-older-student", "surrogate"),
        (replace(written(GRADIENT, stale=True), importance=Importance.PPO_CLIP), "ppo-clip", "surrogate"),
        (replace(written(GRADIENT, stale=True), importance=Importance.MASKED), "bounded-ratio", "surrogate"),
        (written(Point(), stale=True), "full", "exact"),
        (written(TOP_K, stale=True), "bucket", "surrogate"),
        (written(GOLD, stale=True), "label", "exact"),
        (JUDGED, "reward", "exact"),
        (written(replace(RATIO, reward=True, discount=1.0), stale=True), "states-of-an-older-student", "surrogate"),
        (replace(JUDGED, importance=Importance.RATIO), "reward", "exact"),
        (replace(JUDGED, shaped=True), "shaped-advantages", "surrogate"),
        (replace(JUDGED, importance=Importance.PPO_CLIP), "ppo-clip", "surrogate"),
        (replace(JUDGED, discount=0.5), "discounted", "surrogate"),
        (written(replace(RATIO, reward=True, discount=1.0), temperature=0.7), "token-ratio-of-returns", "surrogate"),
        (written(replace(RATIO, reward=True, discount=1.0), steps_per_round=2), "token-ratio-of-rewards", "surrogate"),
        (written(RATIO, steps_per_round=4), "advantages-of-the-first-step", "surrogate"),
        (replace(written(RATIO, steps_per_round=4), discount=1.0), "advantages-of-the-first-step", "surrogate"),
    ],
)
def test_legal(point: Point, name: str, kind: str) -> None:
    assert (judge(point).name, judge(point).kind) == (name, kind)
    assert require_legal(point, "here") is judge(point)


@pytest.mark.parametrize(
    ("point", "names"),
    [
        (Point(), ["full"]),
        (replace(SAMPLED, form=Form.K1, answers="right"), ["k1-loss"]),
        (replace(TOP_K, answers="right", chosen_by_draw=True, reduction=Reduction.SEQUENCE_MEAN), ["bucket"]),
        (replace(TOP_K, divergence=Divergence.ADAPTIVE_KL, detached=True), ["bucket", "detached"]),
        (
            written(Point(detached=True), rows=frozenset({STUDENT, DATASET}), steps_per_round=2, stale=True),
            ["detached"],
        ),
        (
            replace(TAIL, answers="right", chosen_by_draw=True, reduction=Reduction.SEQUENCE_MEAN),
            ["chosen-by-outcome", "chosen-by-draw", "weighed-by-length"],
        ),
        (
            written(
                replace(GRADIENT, importance=Importance.PPO_CLIP, shaped=True, discount=0.5, chosen_by_state=True),
                steps_per_round=2,
                stale=True,
                temperature=0.7,
            ),
            [
                "ppo-clip",
                "shaped-advantages",
                "discounted",
                "states-of-an-older-student",
                "token-ratio-of-returns",
                "advantages-of-the-first-step",
                "returns-of-chosen-states",
            ],
        ),
        (
            written(replace(JUDGED, importance=Importance.RATIO, shaped=True), steps_per_round=2),
            ["shaped-advantages", "token-ratio-of-rewards"],
        ),
        (written(replace(GOLD, answers="right"), rows=frozenset({STUDENT})), ["label-right-rows"]),
        (
            written(replace(GOLD, answers="right"), rows=frozenset({STUDENT}), top_p=0.9),
            ["label-right-rows", "label-shifted-rows"],
        ),
    ],
)
def test_all_reasons_of_a_surrogate(point: Point, names: list[str]) -> None:
    assert [rule.name for rule in reasons(point)] == names


def test_the_first_reason_is_the_verdict() -> None:
    for point in every_point()[::7]:
        found = reasons(point)
        assert found[0] is judge(point)
        assert {rule.kind for rule in found} == {found[0].kind}


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
    top_k: int | None = None
    tail: Tail | None = None
    detach_mixture: bool = False
    form: Form | None = None
    renormalise: bool = False
    length_normalise: bool = False
    baseline: Baseline = Baseline.NONE
    whiten: bool = False
    advantage_clip: float | None = None
    disagreement_weight: float | None = None
    importance: Importance = Importance.NONE
    discount: float = 0.0
    sources: tuple[Source, ...] = field(default=tuple(Source))
    confident_wrong_share: float | None = None
    train_special: bool = True
    train_truncated: bool = True
    teacher_entropy: float | None = None
    entropy_share: float | None = None
    reduction: Reduction = Reduction.TOKEN_MEAN
    correctness: Correctness | None = None
    right_weight: float = 1.0
    wrong_weight: float = 1.0


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (Written(divergence=Divergence.ADAPTIVE_KL), Point(divergence=Divergence.ADAPTIVE_KL, detached=True)),
        (
            Written(divergence=Divergence.SKEW_REVERSE_KL, detach_mixture=True),
            Point(divergence=Divergence.SKEW_REVERSE_KL, detached=True),
        ),
        (Written(support=Support.TOP_K, top_k=2, tail=Tail.BUCKET), TOP_K),
        (Written(support=Support.TOP_K, top_k=1, tail=Tail.SAMPLED), replace(TAIL, one_id=True)),
        (Written(confident_wrong_share=0.1), Point(chosen_by_draw=True)),
        (Written(support=Support.SAMPLED, renormalise=True), replace(SAMPLED, renormalised=True)),
        (Written(train_special=False), Point(chosen_by_draw=True)),
        (Written(train_truncated=False), Point(chosen_by_draw=True)),
        (Written(teacher_entropy=0.5), Point(chosen_by_state=True)),
        (Written(entropy_share=0.5), Point(chosen_by_state=True)),
        (Written(entropy_share=0.5, confident_wrong_share=0.1), Point(chosen_by_state=True, chosen_by_draw=True)),
        *((Written(reduction=kind), Point(reduction=kind)) for kind in Reduction),
        (Written(correctness=Correctness.RIGHT), Point(answers="right")),
        (Written(correctness=Correctness.WRONG), Point(answers="wrong")),
        (Written(right_weight=2.0), Point(answers="right")),
        (Written(right_weight=0.5), Point(answers="wrong")),
        (Written(wrong_weight=0.5), Point(answers="right")),
        *(
            (Written(support=Support.SAMPLED, estimator=POLICY, **{key: value}), replace(GRADIENT, shaped=shaped))
            for key, value, shaped in (
                ("length_normalise", True, True),
                ("whiten", True, True),
                ("baseline", Baseline.BATCH, True),
                ("baseline", Baseline.STATE_KL, False),  # of mean zero at every state: nothing is traded
                ("advantage_clip", 2.0, True),
                ("disagreement_weight", 1.5, True),
            )
        ),
        (Written(teacher=REWARD, support=Support.SAMPLED, estimator=POLICY, discount=1.0), JUDGED),
        (
            Written(teacher=REWARD, support=Support.SAMPLED, estimator=POLICY, discount=1.0, baseline=Baseline.GROUP),
            replace(JUDGED, shaped=True),
        ),
    ],
)
def test_the_point_of_a_term(term: Written, expected: Point) -> None:
    assert replace(Point.of(term, Sampling(), 1.0), sampling=Sampling()) == expected


def test_a_point_meets_only_the_rows_its_term_trains() -> None:
    sampling = Sampling(frozenset({STUDENT, DATASET}), steps_per_round=3)
    point = Point.of(Written(teacher=LABEL, sources=(DATASET,)), sampling, 2.0)
    assert point == Point(label=True, loss_temperature=2.0, sampling=Sampling(frozenset({DATASET}), steps_per_round=3))
    assert Point.of(Written(sources=(TEACHER,)), sampling, 1.0).sampling.rows == frozenset()


PARAMETERS: dict[Divergence, dict[str, float]] = {
    Divergence.JSD: {"beta": 0.5},
    Divergence.SKEW_FORWARD_KL: {"alpha": 0.1},
    Divergence.SKEW_REVERSE_KL: {"alpha": 0.1},
    Divergence.ALPHA_BETA: {"alpha": 0.2, "beta": 0.7},
    Divergence.ADAPTIVE_KL: {"head_mass": 0.5},
}
SHAPES: tuple[dict[str, object], ...] = (
    {},
    {"length_normalise": True},
    {"whiten": True},
    {"baseline": Baseline.BATCH},
    {"baseline": Baseline.STATE_KL},
    {"advantage_clip": 2.0},
    {"disagreement_weight": 1.5},
)


def every_term() -> Iterator[dict[str, object]]:
    """The axes of every term that can be built, but for its sources."""
    for teacher, divergence in itertools.product(("teacher", LABEL), Divergence):
        for detach in (False, True) if divergence is Divergence.SKEW_REVERSE_KL else (False,):
            base = {"teacher": teacher, "divergence": divergence, "detach_mixture": detach}
            for estimator in Estimator:
                yield base | {"estimator": estimator}
                for kind in Correctness:
                    yield base | {"estimator": estimator, "correctness": kind}
                yield base | {"estimator": estimator, "wrong_weight": 0.5}
                if teacher != LABEL:
                    yield base | {"estimator": estimator, "confident_wrong_share": 0.1}
                for k, tail in itertools.product((1, 2), Tail):
                    yield base | {"estimator": estimator, "support": Support.TOP_K, "top_k": k, "tail": tail}
            for form in (None, *Form):
                sampled = base | {"support": Support.SAMPLED, "form": form}
                yield sampled
                yield sampled | {"correctness": Correctness.RIGHT}
                yield sampled | {"train_truncated": False}
                yield sampled | {"reduction": Reduction.SEQUENCE_MEAN}
                yield sampled | {"estimator": POLICY, "entropy_share": 0.5, "discount": 1.0}
                if teacher != LABEL:
                    yield sampled | {"confident_wrong_share": 0.1}
                importances, discounts = tuple(Importance), (0.0, 0.5, 1.0)
                if divergence is not Divergence.REVERSE_KL:  # refused, whatever the rest
                    importances, discounts = importances[:1], discounts[:1]
                for importance, discount in itertools.product(importances, discounts):
                    rewards = sampled | {"estimator": POLICY, "importance": importance, "discount": discount}
                    for shape in SHAPES if importance is Importance.RATIO else SHAPES[:1]:
                        if not (discount and shape.get("baseline") is Baseline.STATE_KL):
                            yield rewards | shape


def every_reward_term() -> Iterator[dict[str, object]]:
    """Those on a reward, which has neither form nor a model's log-probabilities."""
    for divergence in (Divergence.REVERSE_KL, Divergence.TOTAL_VARIATION):
        base = {"teacher": REWARD, "divergence": divergence}
        for support in ({}, {"support": Support.SAMPLED}, {"support": Support.TOP_K, "top_k": 2, "tail": Tail.BUCKET}):
            yield base | support
            for importance, discount in itertools.product(Importance, (0.0, 0.5, 1.0)):
                rewards = base | support | {"estimator": POLICY, "importance": importance, "discount": discount}
                yield rewards
                yield rewards | {"whiten": True}
                for whiten in (True, False):
                    yield rewards | {"baseline": Baseline.GROUP, "whiten": whiten}


def test_objective_asks_the_same_table() -> None:
    """Every combination that a `Term` can hold: refused with the same sentence, or built with the same verdict."""
    samplings = [
        Sampling(rows, temperature=temperature, top_k=top_k, joint=joint, stale=stale, steps_per_round=steps)
        for rows in (frozenset({STUDENT}), frozenset({STUDENT, DATASET}))
        for temperature, top_k, joint, stale in (
            (1.0, 0, False, False),
            (0.5, 0, False, False),
            (1.0, 5, False, False),
            (1.0, 0, True, False),
            (1.0, 0, False, True),
        )
        for steps in (1, 2)
    ]
    refused = built = 0
    for axes, sources in itertools.product(
        (*every_term(), *every_reward_term()), ((STUDENT,), (DATASET,), (STUDENT, DATASET))
    ):
        divergence, importance = Divergence(axes["divergence"]), axes.get("importance")
        term = Term(
            "mine",
            **axes,
            **PARAMETERS.get(divergence, {}),
            clip=0.2 if importance is Importance.PPO_CLIP else None,
            bounds=(0.5, 2.0) if importance in (Importance.TRUNCATED, Importance.MASKED) else None,
            sources=sources,
        )
        for sampling in samplings:
            rule = judge(Point.of(Written(**axes, sources=sources), sampling, 1.0))
            if rule.kind == "refused":
                with pytest.raises(LegalityError) as refusal:
                    Objective([term], sampling=sampling)
                assert str(refusal.value) == f"term 'mine' is refused ({rule.name}): {rule.reason}; {rule.cure}."
                refused += 1
            else:
                assert Objective([term], sampling=sampling).verdicts == (rule,)
                built += 1
    assert refused > 1000
    assert built > 500
