"""Masks, weights and advantages of a round against values made by hand, however its rows lie on the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from etude.axes.names import (
    REWARD,
    Baseline,
    Divergence,
    Estimator,
    FinishReason,
    Importance,
    Reduction,
    Source,
    Support,
)
from etude.axes.schedules import Ramp
from etude.core.advantages import prepare
from etude.core.estimators import group_advantages
from etude.core.records import Prompt, Rollout, Scored, Scores, as_ids
from etude.core.term import Term
from etude.errors import RecordError
from etude.testing import on_ranks

WORKED = [0.0, 2 * math.log(2), -math.log(2)]  # c of the worked example: q = .5, .4, .3 and p = .5, .1, .6


def policy(name: str = "policy", **term: object) -> Term:
    return Term(name, support=Support.SAMPLED, estimator=Estimator.POLICY_GRADIENT, **term)


def row_of(
    log_ratios: Sequence[float],
    *,
    row: int = 0,
    source: Source = Source.STUDENT,
    written: Sequence[bool] | None = None,
    reason: FinishReason = FinishReason.STOP,
    group: int | None = None,
    reward: float | None = None,
) -> Scored:
    """A row whose tokens have these log-ratios c."""
    c = torch.tensor(log_ratios)
    rollout = Rollout(
        Prompt(as_ids([1]), row=row, group=group),
        as_ids([3] * len(c)),
        source,
        reason,
        version=0,
        behaviour_logprobs=-torch.ones(len(c)),
        written=None if written is None else torch.tensor(written),
    )
    marks = Scores("teacher", sampled_logprobs=-1.0 - c)
    return Scored(rollout, {"teacher": marks}, student_logprobs=-torch.ones(len(c)), reward=reward)


def alone(sums: Tensor) -> Tensor:
    return sums


def prepared(terms: Term | Sequence[Term], rows: Sequence[Scored], step: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Weights and advantages [J, C] of each row."""
    terms = [terms] if isinstance(terms, Term) else terms
    found = list[tuple[Tensor, Tensor]]()
    for row in prepare(terms, rows, step=step, total=alone, gather=alone):
        assert row.weights is not None
        assert row.advantages is not None
        found.append((row.weights, row.advantages))
    return found


def trained(term: Term, rows: Sequence[Scored], step: int = 0) -> list[float]:
    """Advantages of the trained tokens as they weigh, all rows in a line."""
    found = prepared(term, rows, step)
    return [x for weights, values in found for x in (weights[0] * values[0])[weights[0] != 0].tolist()]


def near(expected: Sequence[float]) -> object:
    return pytest.approx(list(expected), abs=1e-6)


# One row ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (policy(), [0.0, -1.386294, 0.693147]),
        (policy(discount=0.5), [-0.519860, -1.039721, 0.693147]),
        (policy(discount=1.0), [-0.693147, -0.693147, 0.693147]),
        (policy(discount=1.0, length_normalise=True), [-0.231049, -0.346574, 0.693147]),
        (policy(discount=1.0, advantage_clip=0.5), [-0.5, -0.5, 0.5]),
        (policy(disagreement_weight=1.5), [0.0, 1.5 * -1.386294, 1.166667 * 0.693147]),
        (
            policy(advantage_clip=1.0, disagreement_weight=1.5),
            [0.0, -1.5, 1.166667 * 0.693147],
        ),  # clipped, then weighed
        (policy(baseline=Baseline.BATCH), [0.231049, -1.155245, 0.924196]),  # mean -ln 2 / 3
        (policy(baseline=Baseline.STATE_KL), [0.0, -1.386294, 0.693147]),  # added where the logits are
        (policy(baseline=Baseline.STATE_KL, advantage_clip=0.5), [0.0, -1.386294, 0.693147]),  # and clipped there
        (Term(support=Support.SAMPLED), [0.0, 0.0, 0.0]),
    ],
)
def test_the_worked_example(term: Term, expected: list[float]) -> None:
    assert trained(term, [row_of(WORKED)]) == near(expected)


C4 = [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("term", "step", "expected"),
    [
        (policy(discount=1.0, first_tokens=3), 0, [-7.0, -6.0, -4.0]),  # the sequence divergence of the prefix
        (policy(discount=0.5, first_tokens=3), 0, [-3.0, -4.0, -4.0]),
        (policy(discount=1.0, first_tokens=3, length_normalise=True), 0, [-7 / 3, -6 / 2, -4.0]),
        (policy(discount=1.0, first_tokens=2, baseline=Baseline.BATCH), 0, [-0.5, 0.5]),
        (policy(discount=1.0, skip_first=1), 0, [-14.0, -12.0, -8.0]),
        (policy(discount=1.0, first_tokens=Ramp(2, 4, kind="linear", last=2)), 0, [-3.0, -2.0]),
        (policy(discount=1.0, first_tokens=Ramp(2, 4, kind="linear", last=2)), 2, [-15.0, -14.0, -12.0, -8.0]),
        # A reward is the row's, whatever stretch of it is trained, and so is the length it is divided by.
        (policy(teacher=REWARD, discount=1.0, first_tokens=2), 0, [3.0, 3.0]),
        (policy(teacher=REWARD, discount=1.0, first_tokens=2, length_normalise=True), 0, [3 / 4, 1.0]),
    ],
)
def test_a_return_ends_with_the_stretch_that_is_trained(term: Term, step: int, expected: list[float]) -> None:
    assert trained(term, [row_of(C4, reward=3.0)], step) == near(expected)


def test_what_lies_beyond_the_horizon_has_no_say() -> None:
    term = policy(discount=1.0, whiten=True, first_tokens=2)
    rows = [row_of([1.0, 2.0, tail, 7.0]) for tail in (0.0, 1e6, math.inf)]
    assert trained(term, rows[:1]) == trained(term, rows[1:2]) == trained(term, rows[2:])


def test_advantages_carry_no_gradient() -> None:
    row = row_of(WORKED)
    assert row.student_logprobs is not None
    row.student_logprobs.requires_grad_()
    for term in (policy(), policy(whiten=True, disagreement_weight=1.5), policy(baseline=Baseline.BATCH, discount=1.0)):
        assert not prepared(term, [row])[0][1].requires_grad


@pytest.mark.parametrize(
    ("term", "step", "mask"),
    [
        (Term(), 0, [1, 1, 1]),
        (Term(skip_first=1), 0, [0, 1, 1]),
        (Term(first_tokens=2), 7, [1, 1, 0]),
        (Term(skip_first=1, first_tokens=2), 0, [0, 1, 0]),
        (Term(skip_first=5), 0, [0, 0, 0]),
        (Term(sources={Source.DATASET}), 0, [0, 0, 0]),
        (Term(train_truncated=False), 0, [0, 0, 0]),
    ],
)
@pytest.mark.parametrize("reduction", Reduction)
def test_weights(term: Term, step: int, mask: list[int], reduction: Reduction) -> None:
    term = Term(
        skip_first=term.skip_first,
        first_tokens=term.first_tokens,
        sources=term.sources,
        train_truncated=term.train_truncated,
        reduction=reduction,
    )
    ((weights, _),) = prepared(term, [row_of(WORKED, reason=FinishReason.LENGTH)], step)
    divisor = max(sum(mask), 1) if reduction is Reduction.SEQUENCE_MEAN else 1
    assert weights[0].tolist() == near([value / divisor for value in mask])


# Provenance ---------------------------------------------------------------------------------------------------------

TURNS = [True, True, False, False, True, False, True]  # three turns; a tool wrote the others
LOSSES = [1.0, 2.0, 50.0, 60.0, 4.0, 70.0, 8.0]


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (policy(), [-1.0, -2.0, -4.0, -8.0]),
        (policy(discount=1.0), [-15.0, -14.0, -12.0, -8.0]),
        (policy(discount=1.0, length_normalise=True), [-15 / 4, -14 / 3, -12 / 2, -8.0]),
        (policy(baseline=Baseline.BATCH), [2.75, 1.75, -0.25, -4.25]),
        (policy(disagreement_weight=2.0), [-1.0 * 2, -2.0 * (2 - 1 / 15), -4.0 * (2 - 3 / 15), -8.0 * (2 - 7 / 15)]),
    ],
)
def test_a_tools_tokens_are_not_trained_not_counted_and_earn_nothing(term: Term, expected: list[float]) -> None:
    row = row_of(LOSSES, written=TURNS)
    ((weights, _),) = prepared(term, [row])
    assert (weights[0] != 0).tolist() == TURNS
    assert trained(term, [row]) == near(expected)


def test_a_row_that_only_tools_wrote_is_idle() -> None:
    row = row_of([1.0, 2.0], written=[False, False])
    ((weights, advantages),) = prepared(policy(discount=1.0, whiten=True), [row])
    assert not weights.any()
    assert not advantages.any()


# The round ----------------------------------------------------------------------------------------------------------

LABEL = Term("gold", teacher="label", divergence=Divergence.FORWARD_KL, sources={Source.DATASET})
ROUND = [
    row_of([0.5, -1.0, 2.0], row=0),
    row_of([3.0], row=1),
    row_of([9.0, 9.0], row=2, source=Source.DATASET),
    row_of([-0.5, 0.25, 4.0, 1.0], row=3, written=[True, False, True, True]),
    row_of([7.0, 7.0, 7.0], row=4, reason=FinishReason.LENGTH),
]
OF_ROUND = [0.5, -1.0, 2.0, 3.0, -0.5, 4.0, 1.0]  # c of what a student's finished row trains
FINISHED = {"sources": {Source.STUDENT}, "train_truncated": False}


def test_moments_are_those_of_the_rounds_trained_tokens() -> None:
    mean = sum(OF_ROUND) / 7
    deviation = math.sqrt(sum((c - mean) ** 2 for c in OF_ROUND) / 7)
    centred = trained(policy(baseline=Baseline.BATCH, **FINISHED), ROUND)
    assert centred == near([mean - c for c in OF_ROUND])
    whitened = trained(policy(whiten=True, **FINISHED), ROUND)
    assert whitened == near([(mean - c) / deviation for c in OF_ROUND])
    assert sum(whitened) == pytest.approx(0.0, abs=1e-5)
    assert sum(x * x for x in whitened) / 7 == pytest.approx(1.0, abs=1e-5)


def test_whitened_then_clipped_then_weighed() -> None:
    mean = sum(OF_ROUND) / 7
    deviation = math.sqrt(sum((c - mean) ** 2 for c in OF_ROUND) / 7)
    expected = list[float]()
    for sizes in (OF_ROUND[:3], OF_ROUND[3:4], OF_ROUND[4:]):
        for t, c in enumerate(sizes):
            used = sum(abs(x) for x in sizes[:t]) / sum(abs(x) for x in sizes)
            expected.append(max(-0.5, min(0.5, (mean - c) / deviation)) * (1 + 0.5 * (1 - used)))
    term = policy(whiten=True, advantage_clip=0.5, disagreement_weight=1.5, **FINISHED)
    assert trained(term, ROUND) == near(expected)


def test_equal_returns_say_nothing() -> None:
    rows = [row_of([0.3, 0.3], row=0), row_of([0.3], row=1)]
    assert trained(policy(whiten=True), rows) == [0.0, 0.0, 0.0]
    assert trained(policy(baseline=Baseline.BATCH), rows) == near([0.0, 0.0, 0.0])


def prepared_on_ranks(terms: Sequence[Term], ranks: Sequence[Sequence[Scored]]) -> list[Scored]:
    """Every rank prepares its own rows; then they are put together."""
    found = on_ranks(
        lambda rank, total, gather: prepare(terms, ranks[rank], step=0, total=total, gather=gather), len(ranks)
    )
    return [row for rows in found for row in rows]


@pytest.mark.parametrize("share", range(len(ROUND) + 1))
def test_two_ranks_have_the_moments_of_one(share: int) -> None:
    """However the rows are split, a rank without any row included."""
    terms = [
        policy("plain"),
        policy("whitened", whiten=True, **FINISHED),
        LABEL,
        policy("centred", baseline=Baseline.BATCH, discount=0.5, length_normalise=True, **FINISHED),
    ]
    found = prepared_on_ranks(terms, [ROUND[:share], ROUND[share:]])
    for row, (weights, advantages) in zip(found, prepared(terms, ROUND), strict=True):
        assert row.weights is not None
        assert row.advantages is not None
        assert torch.equal(row.weights, weights)
        torch.testing.assert_close(row.advantages, advantages, atol=1e-6, rtol=0)


def test_the_order_of_rows_changes_nothing() -> None:
    terms = [policy("whitened", whiten=True), policy("centred", baseline=Baseline.BATCH, discount=1.0)]
    turned = list(reversed(prepared(terms, list(reversed(ROUND)))))
    for (_, found), (_, expected) in zip(turned, prepared(terms, ROUND), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("term", [policy(whiten=True), policy(baseline=Baseline.BATCH)], ids=["whiten", "batch"])
def test_a_term_that_trains_no_row_of_the_round(term: Term) -> None:
    """Its sums are handed in all the same, on every rank, and its advantages are zero."""
    gold = [row_of([9.0, 9.0], row=r, source=Source.DATASET) for r in range(2)]
    idle = policy(whiten=term.whiten, baseline=term.baseline, sources={Source.STUDENT})
    for row in prepared_on_ranks([idle], [gold, []]):
        assert row.weights is not None
        assert row.advantages is not None
        assert not row.weights.any()
        assert not row.advantages.any()
    assert prepare([idle], [], step=0, total=alone, gather=alone) == []


# What is missing ----------------------------------------------------------------------------------------------------


def test_a_row_that_a_term_does_not_train_needs_no_scores() -> None:
    bare = Scored(Rollout(Prompt(as_ids([1]), row=0), as_ids([2]), Source.DATASET, FinishReason.STOP, version=0), {})
    ((weights, _),) = prepared(policy(whiten=True, sources={Source.STUDENT}), [bare])
    assert not weights.any()
    with pytest.raises(RecordError, match=r"needs the log-probabilities of student and teacher .* the row has scores"):
        prepared(policy(), [bare])


@pytest.mark.parametrize("importance", [Importance.TRUNCATED, Importance.MASKED])
def test_a_ratio_needs_what_the_sampler_recorded(importance: Importance) -> None:
    row = row_of([1.0])
    bare = Rollout(row.rollout.prompt, row.rollout.completion_ids, Source.STUDENT, FinishReason.STOP, version=0)
    unsure = Scored(bare, row.scores, student_logprobs=row.student_logprobs)
    with pytest.raises(RecordError, match="weighs row 0 by student / behaviour, and the row carries no"):
        prepared(policy(importance=importance, bounds=(0.5, 2.0)), [unsure])


def test_a_choice_needs_the_students_own_marks() -> None:
    row = row_of([1.0])
    with pytest.raises(RecordError, match="chooses tokens by the student's entropy, which row 0 lacks"):
        prepared(Term(entropy_share=0.5), [row])
    bare = row.with_prepared(student_logprobs=None)
    with pytest.raises(RecordError, match="needs the log-probabilities of student and teacher 'teacher' for row 0"):
        prepared(Term(confident_wrong_share=0.5), [bare])
    with pytest.raises(RecordError, match="needs the log-probabilities of student and teacher 'reference' for row 0"):
        prepared(policy(extrapolation=1.25), [row])


# Targets of two models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.5, 1.25, 2.0])
def test_rewards_of_an_extrapolated_teacher(power: float) -> None:
    """-c = power log p + (1 - power) log ref - log q, with log q = -1, log p = -1 - c and ref = 1/4."""
    row = row_of(WORKED)
    reference = Scores("reference", sampled_logprobs=torch.full((3,), 0.25).log())
    both = Scored(row.rollout, {**row.scores, "reference": reference}, student_logprobs=row.student_logprobs)
    rewards = [power * (-1.0 - c) + (1 - power) * math.log(0.25) + 1.0 for c in WORKED]
    assert trained(policy(extrapolation=power), [both]) == near(rewards)
    assert trained(policy(extrapolation=power, discount=1.0), [both]) == near([sum(rewards[t:]) for t in range(3)])
    assert trained(policy(teacher="reference"), [both]) == near([math.log(0.25) + 1.0] * 3)
    assert trained(policy(extrapolation=1.0), [row]) == near([-c for c in WORKED])  # the reference is not asked


# Informative tokens ---------------------------------------------------------------------------------------------------


def with_entropy(row: Scored, *entropies: float) -> Scored:
    return row.with_prepared(student_entropy=torch.tensor(entropies))


CHOICES = [
    with_entropy(row_of([0.0, 3.0, -4.0], row=0), 2.0, 0.1, 0.2),
    with_entropy(row_of([0.5], row=1), 0.3),
    with_entropy(row_of([9.0, 9.0], row=2, source=Source.DATASET), 9.0, 9.0),  # of no term below
    with_entropy(row_of([1.0, 8.0, 2.0, 0.1], row=3, written=[True, False, True, True]), 1.5, 9.0, 0.4, 1.0),
]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        # of entropies 2, .1, .2 | .3 | 1.5, .4, 1 and c 0, 3, -4 | .5 | 1, 2, .1
        ({"entropy_share": 3 / 7}, [[1, 0, 0], [0], [0, 0], [1, 0, 0, 1]]),
        ({"confident_wrong_share": 2 / 7}, [[0, 1, 0], [0], [0, 0], [0, 0, 1, 0]]),
        ({"entropy_share": 3 / 7, "confident_wrong_share": 0.25}, [[1, 1, 0], [0], [0, 0], [1, 0, 0, 1]]),
        ({"entropy_share": 3 / 7, "confident_wrong_share": 0.75}, [[1, 1, 0], [1], [0, 0], [1, 0, 1, 1]]),
        ({"entropy_share": 0.01}, [[0, 0, 0], [0], [0, 0], [0, 0, 0, 0]]),
    ],
)
@pytest.mark.parametrize("share", range(len(CHOICES) + 1))
def test_thresholds_are_the_rounds(shares: dict[str, float], expected: list[list[int]], share: int) -> None:
    """Among the tokens the term trains, however the rows lie on the ranks."""
    term = Term("chosen", sources={Source.STUDENT}, **shares)
    found = prepared_on_ranks([Term("all"), term], [CHOICES[:share], CHOICES[share:]])
    assert [row.weights[1].tolist() for row in found if row.weights is not None] == expected
    assert [row.candidates.tolist() for row in found if row.candidates is not None] == [[3, 3], [1, 1], [2, 0], [3, 3]]


def test_moments_are_those_of_the_chosen_tokens() -> None:
    term = policy(baseline=Baseline.BATCH, sources={Source.STUDENT}, entropy_share=3 / 7)
    mean = (0.0 + 1.0 + 0.1) / 3
    assert trained(term, CHOICES) == near([mean - 0.0, mean - 1.0, mean - 0.1])


def test_a_choice_leaves_later_rewards_in_the_return() -> None:
    term = policy(discount=1.0, sources={Source.STUDENT}, entropy_share=1 / 7)
    assert trained(term, CHOICES) == near([-(0.0 + 3.0 - 4.0)])


# Rewards ------------------------------------------------------------------------------------------------------------


def judged(name: str = REWARD, **term: object) -> Term:
    return policy(name, **{"teacher": REWARD, "discount": 1.0} | term)


GROUPS = [  # one question with three answers, and one with two
    row_of([0.5, -1.0], row=0, group=0, reward=1.0),
    row_of([3.0], row=1, group=0, reward=0.0),
    row_of([2.0, 2.0, 2.0], row=2, group=0, reward=0.5),
    row_of([1.0], row=3, group=5, reward=-2.0),
    row_of([1.0, 4.0], row=4, group=5, reward=4.0),
]


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (judged(), [1.0, 1.0, 0.0, 0.5, 0.5, 0.5, -2.0, 4.0, 4.0]),
        (judged(discount=0.5), [0.5, 1.0, 0.0, 0.125, 0.25, 0.5, -2.0, 2.0, 4.0]),
        (judged(baseline=Baseline.GROUP), [0.5, 0.5, -0.5, 0.0, 0.0, 0.0, -3.0, 3.0, 3.0]),
        (judged(baseline=Baseline.GROUP, discount=0.5), [0.25, 0.5, -0.5, 0.0, 0.0, 0.0, -3.0, 1.5, 3.0]),
        # deviations 1/2 and sqrt 18, of the sample
        (
            judged(baseline=Baseline.GROUP, whiten=True),
            [1.0, 1.0, -1.0, 0.0, 0.0, 0.0, -(0.5**0.5), 0.5**0.5, 0.5**0.5],
        ),
        (judged(baseline=Baseline.GROUP, advantage_clip=0.4), [0.4, 0.4, -0.4, 0.0, 0.0, 0.0, -0.4, 0.4, 0.4]),
        (  # the round's mean is one over its tokens
            judged(baseline=Baseline.BATCH),
            [r - 9.5 / 9 for r in (1.0, 1.0, 0.0, 0.5, 0.5, 0.5, -2.0, 4.0, 4.0)],
        ),
        (judged(length_normalise=True), [0.5, 1.0, 0.0, 0.5 / 3, 0.25, 0.5, -2.0, 2.0, 4.0]),
    ],
)
def test_rewards(term: Term, expected: list[float]) -> None:
    assert trained(term, GROUPS) == near(expected)


def test_every_trained_token_has_its_rows_reward_and_a_tools_has_none() -> None:
    row = row_of(LOSSES, written=TURNS, reward=3.0)
    assert trained(judged(), [row]) == near([3.0] * 4)
    assert trained(judged(discount=0.5), [row]) == near([3 / 64, 3 / 32, 3 / 4, 3.0])
    assert trained(judged(discount=0.5), [row_of([1.0, 9.0], written=[True, False], reward=3.0)]) == near([1.5])
    assert trained(judged(first_tokens=2), [row_of([1.0] * 4, reward=3.0)]) == near([3.0, 3.0])


@pytest.mark.parametrize("normalise", [False, True])
def test_a_group_is_that_of_the_formula(normalise: bool) -> None:
    rewards = torch.tensor([0.3, 0.1, 0.9, 0.3, 7.0])
    rows = [row_of([1.0], row=r, group=2, reward=reward.item()) for r, reward in enumerate(rewards)]
    found = trained(judged(baseline=Baseline.GROUP, whiten=normalise), rows)
    assert found == near(group_advantages(rewards, normalise=normalise).tolist())


def test_equal_rewards_say_nothing() -> None:
    rows = [row_of([1.0, 1.0], row=r, group=0, reward=0.1) for r in range(3)]
    assert trained(judged(baseline=Baseline.GROUP, whiten=True), rows) == [0.0] * 6
    assert trained(judged(baseline=Baseline.GROUP), rows) == near([0.0] * 6)


def test_only_rows_that_are_trained_are_compared() -> None:
    """A cut row and one from the dataset: neither trained nor in the mean. A row left alone has advantage 0."""
    others = [
        row_of([1.0], row=5, group=0, reward=90.0, reason=FinishReason.LENGTH),
        row_of([1.0], row=6, group=5, reward=-90.0, source=Source.DATASET),
        row_of([1.0], row=7, group=7, reward=6.0),
        row_of([1.0], row=8, group=7, reward=2.0, reason=FinishReason.LENGTH),
    ]
    term = judged(baseline=Baseline.GROUP, **FINISHED)
    assert trained(term, [*GROUPS, *others]) == near([0.5, 0.5, -0.5, 0.0, 0.0, 0.0, -3.0, 3.0, 3.0, 0.0])
    whitened = judged(baseline=Baseline.GROUP, whiten=True, **FINISHED)
    assert trained(whitened, [*GROUPS, *others])[-1] == 0.0


BESIDE = [
    policy("kl"),
    judged("whitened", baseline=Baseline.GROUP, whiten=True),
    policy("kl_whitened", whiten=True),
    judged("grouped", baseline=Baseline.GROUP, discount=0.5),
    judged("centred", baseline=Baseline.BATCH),
]


@pytest.mark.parametrize("share", range(len(GROUPS) + 1))
def test_two_ranks_have_the_groups_of_one(share: int) -> None:
    """However the rows are dealt, a rank without any row included, and with a group that lies on both."""
    for ranks in ([GROUPS[:share], GROUPS[share:]], [GROUPS[::2], GROUPS[1::2]]):
        found = {row.rollout.prompt.row: row.advantages for row in prepared_on_ranks(BESIDE, ranks)}
        for row, (_, advantages) in zip(GROUPS, prepared(BESIDE, GROUPS), strict=True):
            torch.testing.assert_close(found[row.rollout.prompt.row], advantages, atol=1e-6, rtol=0)


def test_a_reward_is_whitened_before_any_divergence_is_added() -> None:
    """Two right answers say nothing, whatever a divergence beside them says, which keeps its size."""
    rows = [row_of([c], row=r, group=0, reward=1.0) for r, c in enumerate([0.01, -0.01])]
    for whitened in (judged(baseline=Baseline.GROUP, whiten=True), judged(whiten=True)):
        found = [values for _, values in prepared([whitened, policy("kl")], rows)]
        assert [values[0].tolist() for values in found] == [[0.0], [0.0]]
        assert [values[1].item() for values in found] == near([-0.01, 0.01])


def test_a_question_with_one_row_has_nobody_to_be_compared_with() -> None:
    lone = row_of([1.0], row=9, reward=1.0)  # its own group, 9
    for ranks in ([[*GROUPS, lone], []], [GROUPS, [lone]]):
        with pytest.raises(RecordError, match="question 9 of the round has one row; expected at least two"):
            prepared_on_ranks([judged(baseline=Baseline.GROUP)], ranks)


def test_a_trained_row_needs_a_reward() -> None:
    rows = [row_of([1.0], source=Source.DATASET), row_of([1.0], row=1, reward=1.0)]
    assert trained(judged(sources={Source.STUDENT}), rows) == [1.0]
    with pytest.raises(RecordError, match="trains row 0 by its reward, and the row has none"):
        prepared(judged(), rows)


def test_a_reward_asks_for_no_model() -> None:
    bare = Rollout(Prompt(as_ids([1]), row=0), as_ids([2, 3]), Source.STUDENT, FinishReason.STOP, version=0)
    assert trained(judged(), [Scored(bare, {}, reward=2.0)]) == [2.0, 2.0]
    with pytest.raises(RecordError, match="weighs row 0 by student / behaviour, and the row carries no"):
        prepared(judged(importance=Importance.RATIO), [Scored(bare, {}, reward=2.0)])


def test_a_groups_rows_are_compared_whatever_tokens_are_chosen() -> None:
    """The first row's tokens are all too certain to be trained, and its reward stays in the mean."""
    rows = [
        with_entropy(row_of([1.0, 1.0], row=0, group=0, reward=0.0), 0.1, 0.2),
        with_entropy(row_of([1.0, 1.0], row=1, group=0, reward=1.0), 2.0, 0.3),
    ]
    assert trained(judged(baseline=Baseline.GROUP, entropy_share=0.5), rows) == near([0.5, 0.5])
