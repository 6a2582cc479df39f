"""A term holds what it says and nothing that would do nothing; it asks its teacher for what it needs."""

from __future__ import annotations

import math

import pytest

from etude.axes.names import (
    REFERENCE,
    Baseline,
    Divergence,
    Estimator,
    Form,
    Gives,
    Importance,
    Owner,
    Reduction,
    Source,
    Support,
    Tail,
)
from etude.axes.schedules import Ramp
from etude.core.term import Term

POLICY = {"support": Support.SAMPLED, "estimator": Estimator.POLICY_GRADIENT}
HIDDEN, DRAWN = Gives.HIDDEN_STATES, Gives.SAMPLED_LOGPROBS


def test_a_term_takes_plain_words() -> None:
    plain = Term(
        "a",
        support="sampled",
        divergence="reverse_kl",
        estimator="policy_gradient",
        form="k1",
        importance="ratio",
        baseline="batch",
        reduction="sequence_mean",
        sources=["student"],
    )
    assert plain == Term(
        "a",
        support=Support.SAMPLED,
        estimator=Estimator.POLICY_GRADIENT,
        form=Form.K1,
        importance=Importance.RATIO,
        baseline=Baseline.BATCH,
        reduction=Reduction.SEQUENCE_MEAN,
        sources={Source.STUDENT},
    )
    assert plain.estimator is Estimator.POLICY_GRADIENT
    kept = Term(support="top_k", top_k=2, owner="union", tail="truncate")
    assert (kept.owner, kept.tail) == (Owner.UNION, Tail.TRUNCATE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"divergence": "reverse-kl"}, "'reverse-kl' is not a valid Divergence"),
        ({"sources": ["pupil"]}, "'pupil' is not a valid Source"),
        ({"support": "top_k", "top_k": 2, "tail": "drop"}, "'drop' is not a valid Tail"),
        ({"support": "top_k", "top_k": 2, "owner": "both"}, "'both' is not a valid Owner"),
        ({**POLICY, "baseline": "mean"}, "'mean' is not a valid Baseline"),
    ],
)
def test_an_unknown_word_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Term(**arguments)


def test_top_k_left_open_is_the_teachers_with_a_bucket() -> None:
    term = Term(support=Support.TOP_K, top_k=8)
    assert (term.owner, term.tail) == (Owner.TEACHER, Tail.BUCKET)
    assert (Term().owner, Term().tail) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"form": Form.K2}, "has form 'k2' with support 'full'; a form belongs to support 'sampled'"),
        (
            {"support": Support.TOP_K, "top_k": 2, "form": Form.K2},
            "form 'k2' with support 'top_k'; a form belongs to support 'sampled'",
        ),
        ({"support": Support.TOP_K}, "top_k None with support 'top_k'; expected how many ids are kept, at least 1"),
        ({"support": Support.TOP_K, "top_k": 0}, "top_k 0 with support 'top_k'; expected how many ids"),
        ({"top_k": 2}, "top_k 2, owner None and tail None with support 'full'; all three belong to support 'top_k'"),
        ({"owner": Owner.UNION}, "owner union and tail None with support 'full'; all three belong"),
        ({"support": Support.SAMPLED, "tail": Tail.SAMPLED}, "tail sampled with support 'sampled'; all three belong"),
        ({"discount": 1.0}, "has discount 1.0 with estimator 'analytic'; these belong to 'policy_gradient'"),
        ({"importance": Importance.RATIO}, "has importance ratio with estimator 'analytic'; these belong"),
        ({"length_normalise": True}, "has length_normalise True with estimator 'analytic'"),
        ({"baseline": Baseline.STATE_KL}, "has baseline state_kl with estimator 'analytic'"),
        ({"whiten": True, "advantage_clip": 2.0}, "has whiten True, advantage_clip 2.0 with estimator 'analytic'"),
        ({"disagreement_weight": 1.5}, "has disagreement_weight 1.5 with estimator 'analytic'"),
        ({"clip": 0.2}, "a clip goes with 'ppo_clip' alone"),
        ({"bounds": (0.5, 2.0)}, "bounds go with 'truncated' and 'masked' alone"),
        ({"divergence": Divergence.JSD}, r"takes \['beta'\], got \[\]"),
        ({"beta": 0.5}, r"takes no parameter, got \['beta'\]"),
        ({"divergence": Divergence.ALPHA_BETA, "alpha": 0.5}, r"takes \['alpha', 'beta'\], got \['alpha'\]"),
        ({"divergence": Divergence.ADAPTIVE_KL}, r"takes \['head_mass'\], got \[\]"),
        ({"rescale": True}, "only 'jsd' is rescaled"),
        ({"detach_mixture": True}, "only 'skew_reverse_kl' has a mixture to detach"),
        ({"divergence": Divergence.SKEW_REVERSE_KL, "alpha": 1.0}, "strictly between 0 and 1"),
        ({"coefficient": 0.0}, "has coefficient 0.0; expected a number above 0"),
        ({"coefficient": -1.0}, "has coefficient -1.0; expected a number above 0"),
        ({"coefficient": Ramp(1.0, -0.5, kind="linear", last=4)}, "expected a number above 0, or a ramp between such"),
        ({"coefficient": Ramp(0.0, 0.0, kind="linear", last=4)}, "expected a number above 0, or a ramp between such"),
        ({"skip_first": -1}, "has skip_first -1; expected a number of tokens, from 0 on"),
        ({"first_tokens": 0}, "has first_tokens 0 with skip_first 0; the horizon must lie beyond"),
        ({"first_tokens": 3, "skip_first": 3}, "has first_tokens 3 with skip_first 3; the horizon must lie beyond"),
        ({"first_tokens": Ramp(8, 2, kind="linear", last=4), "skip_first": 2}, "with skip_first 2; the horizon must"),
        ({"first_tokens": Ramp(0.4, 8, kind="linear", last=4)}, "with skip_first 0; the horizon must lie beyond"),
        ({"first_tokens": Ramp(8, 2.4, kind="linear", last=4), "skip_first": 2}, "with skip_first 2; the horizon must"),
        ({"source_weights": {"student": 0.0}}, "source_weights.student 0.0; expected a number above 0; sources says"),
        ({"source_weights": {"student": math.inf}}, "source_weights.student inf; expected a number above 0"),
        ({"source_weights": {"teacher": 2.0}, "sources": ["student"]}, "it trains no rows of 'teacher'"),
        ({"wrong_weight": 0.0}, "has wrong_weight 0.0; expected a number above 0; correctness says"),
        ({"right_weight": math.nan}, "has right_weight nan; expected a number above 0"),
        ({"right_weight": 2.0, "wrong_weight": 2.0}, "both 2.0; that is its coefficient"),
        (
            {"correctness": "right", "right_weight": 2.0},
            "right_weight 2.0 and wrong_weight 1.0 with correctness 'right'; these weigh both kinds",
        ),
        (
            {**POLICY, "teacher": "reward", "correctness": "right"},
            "with teacher 'reward'; a reward says by itself which rows are right",
        ),
        ({**POLICY, "teacher": "reward", "wrong_weight": 2.0}, "a reward says by itself which rows are right"),
        ({"perplexity_temperature": 1.0}, "has perplexity_temperature 1.0 without correctness; right rows are weighed"),
        ({"correctness": "right", "perplexity_temperature": 0.0}, "has perplexity_temperature 0.0; expected a number"),
        (
            {
                "teacher": "label",
                "divergence": Divergence.FORWARD_KL,
                "correctness": "wrong",
                "perplexity_temperature": 1.0,
            },
            "on wrong rows with teacher 'label'; wrong rows are weighed by a model's perplexity",
        ),
        ({"teacher_entropy": -0.1}, "has teacher_entropy -0.1 with teacher 'teacher'; expected a threshold in nats"),
        (
            {"teacher": "label", "divergence": Divergence.FORWARD_KL, "teacher_entropy": 0.5},
            "has teacher_entropy 0.5 with teacher 'label'; expected a threshold in nats, from 0 on, for a model's",
        ),
    ],
)
def test_a_term_refuses_what_would_do_nothing(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Term(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"discount": 1.5}, "has discount 1.5; expected 0"),
        ({"importance": Importance.PPO_CLIP}, "clip None with importance 'ppo_clip'"),
        ({"importance": Importance.PPO_CLIP, "clip": 1.0}, "has clip 1.0; expected a share between 0 and 1"),
        ({"importance": Importance.RATIO, "clip": 0.2}, "a clip goes with 'ppo_clip' alone"),
        ({"importance": Importance.TRUNCATED}, "bounds None with importance 'truncated'; bounds go with"),
        ({"importance": Importance.RATIO, "bounds": (0.5, 2.0)}, "with importance 'ratio'; bounds go with"),
        (
            {"importance": Importance.MASKED, "bounds": (2.0, 2.0)},
            r"has bounds \(2.0, 2.0\); expected \[low, high\] with 0",
        ),
        (
            {"importance": Importance.MASKED, "bounds": (-1.0, 2.0)},
            r"has bounds \(-1.0, 2.0\); expected \[low, high\] with 0",
        ),
        ({"baseline": Baseline.STATE_KL, "discount": 0.5}, "it is the mean of one token's own log-ratio"),
        ({"baseline": Baseline.STATE_KL, "length_normalise": True}, "it is the mean of one token's own log-ratio"),
        ({"baseline": Baseline.STATE_KL, "whiten": True}, "it is the mean of one token's own log-ratio"),
        ({"baseline": Baseline.BATCH, "whiten": True}, "whitening takes the round's mean off already"),
        ({"advantage_clip": 0.0}, "has advantage_clip 0.0; expected a size above 0"),
        ({"disagreement_weight": 1.0}, "has disagreement_weight 1.0; expected a weight above 1"),
        (
            {"baseline": Baseline.GROUP},
            "has baseline 'group' with teacher 'teacher'; it is the mean reward of .*; write baseline 'batch'",
        ),
        ({"teacher": "reward", "form": Form.K1}, "has form k1 with teacher 'reward'; these compare with a model"),
        ({"teacher": "reward", "baseline": Baseline.STATE_KL}, "has baseline state_kl with teacher 'reward'; these"),
        ({"teacher": "reward", "disagreement_weight": 1.5}, "has disagreement_weight 1.5 with teacher 'reward'; these"),
        ({"teacher": "reward", "teacher_entropy": 0.0}, "has teacher_entropy 0.0 with teacher 'reward'; these"),
        (
            {"teacher": "reward", "confident_wrong_share": 0.1},
            "has confident_wrong_share 0.1 with teacher 'reward'; these",
        ),
        ({"teacher": "reward", "extrapolation": 1.25}, "has extrapolation 1.25 with teacher 'reward'; a model other"),
    ],
)
def test_a_policy_gradient_term_refuses_what_is_out_of_range(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Term("a", **POLICY, **arguments)


@pytest.mark.parametrize(
    ("term", "needs"),
    [
        (Term(), {HIDDEN}),
        (Term(support=Support.SAMPLED), {DRAWN}),
        (Term(support=Support.TOP_K, top_k=2, tail=Tail.SAMPLED), {HIDDEN}),
        (Term(teacher="label", divergence=Divergence.FORWARD_KL), {Gives.LABELS}),
        (Term(**POLICY), {DRAWN}),
        (Term(**POLICY, baseline=Baseline.STATE_KL), {DRAWN, HIDDEN}),
        (Term(**POLICY, baseline=Baseline.BATCH), {DRAWN}),
        (Term(**POLICY, teacher="reward", discount=1.0), {Gives.REWARDS}),
        (Term(support=Support.SAMPLED, teacher_entropy=0.5), {DRAWN, HIDDEN}),
        (Term(entropy_share=0.5), {HIDDEN}),
        (Term(confident_wrong_share=0.5), {DRAWN, HIDDEN}),
        (Term(**POLICY, extrapolation=1.25), {DRAWN}),
        (Term(support=Support.SAMPLED, renormalise=True), {DRAWN, Gives.KEPT_MASS}),
        (Term(**POLICY, renormalise=True, baseline=Baseline.STATE_KL), {DRAWN, HIDDEN, Gives.KEPT_MASS}),
        (Term(**POLICY, renormalise=True, teacher="reward", discount=1.0), {Gives.REWARDS}),
    ],
)
def test_needs(term: Term, needs: set[Gives]) -> None:
    assert term.needs == needs


@pytest.mark.parametrize(
    ("term", "teachers"),
    [
        (Term(), ("teacher",)),
        (Term(teacher=REFERENCE), (REFERENCE,)),
        (Term(teacher="label", divergence=Divergence.FORWARD_KL), ()),
        (Term(extrapolation=1.25), ("teacher", REFERENCE)),
        (Term(extrapolation=1.0), ("teacher",)),
    ],
)
def test_whom_it_asks(term: Term, teachers: tuple[str, ...]) -> None:
    assert term.teachers == teachers


def test_a_power_of_one_is_no_power() -> None:
    assert Term(extrapolation=1.0) == Term()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"extrapolation": 0.0}, "has extrapolation 0.0; expected the teacher's power, above 0"),
        ({"extrapolation": -1.0}, "has extrapolation -1.0; expected the teacher's power, above 0"),
        (
            {"extrapolation": 1.25, "teacher": REFERENCE},
            "has extrapolation 1.25 with teacher 'reference'; a model other",
        ),
        ({"extrapolation": 1.25, "teacher": "label"}, "has extrapolation 1.25 with teacher 'label'; a model other"),
        ({"entropy_share": 0.0}, "has entropy_share 0.0; expected a share of the tokens, strictly between 0 and 1"),
        ({"confident_wrong_share": 1.0}, "has confident_wrong_share 1.0; expected a share of the tokens"),
        (
            {"confident_wrong_share": 0.1, "teacher": "label", "divergence": Divergence.FORWARD_KL},
            "has confident_wrong_share 0.1 with teacher 'label'; who is wrong is said by a model",
        ),
    ],
)
def test_what_two_models_and_a_choice_of_tokens_refuse(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Term(**arguments)


def test_what_prepare_must_know() -> None:
    assert Term(entropy_share=0.5).chooses
    assert Term(confident_wrong_share=0.5).chooses
    assert not Term(teacher_entropy=0.5).chooses
    assert not Term(support=Support.SAMPLED).rewards_needed
    assert Term(**POLICY).rewards_needed
    assert not Term(**POLICY, baseline=Baseline.STATE_KL).round_moments_needed
    assert Term(**POLICY, baseline=Baseline.BATCH).round_moments_needed
    assert Term(**POLICY, whiten=True).round_moments_needed
    assert Term(**POLICY).log_ratios_needed
    judged = {**POLICY, "teacher": "reward", "discount": 1.0}
    assert Term(**judged).rewards_needed
    assert not Term(**judged).log_ratios_needed
    assert Term(**judged, whiten=True).round_moments_needed
    assert not Term(**judged, whiten=True, baseline=Baseline.GROUP).round_moments_needed  # the group's are enough


def test_what_moves_with_the_step() -> None:
    growing = Ramp(2, 5, kind="linear", last=3)
    term = Term(coefficient=Ramp(1.0, 0.0, kind="linear", first=1, last=3), first_tokens=growing)
    assert [term.coefficient_at(step) for step in range(5)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert [term.horizon_at(step) for step in range(5)] == [2, 3, 4, 5, 5]
    assert (Term(first_tokens=7).horizon_at(3), Term().horizon_at(3), Term().coefficient_at(3)) == (7, None, 1.0)


def test_what_weights_of_rows_ask_for() -> None:
    label = {"teacher": "label", "divergence": Divergence.FORWARD_KL}
    asked = [
        (Term(), False, False, {HIDDEN}),
        (Term(source_weights={"student": 0.5}), False, False, {HIDDEN}),
        (Term(correctness="right"), True, False, {HIDDEN}),
        (Term(right_weight=2.0), True, False, {HIDDEN}),
        (Term(correctness="wrong", perplexity_temperature=1.0), True, False, {HIDDEN, DRAWN}),
        (Term(correctness="right", perplexity_temperature=1.0), True, True, {HIDDEN}),
        (Term(**label, correctness="right", perplexity_temperature=1.0), True, True, {Gives.LABELS}),
    ]
    for term, verdict, student, needs in asked:
        assert (term.verdicts_needed, term.student_logprobs_needed, term.needs) == (verdict, student, needs)


def test_a_term_trains_special_tokens_unless_it_has_their_ids() -> None:
    assert Term().train_special
    assert not Term(left_out_ids=[3, 3]).train_special
    assert Term(left_out_ids=[3, 3]) == Term(left_out_ids={3})
