"""What a round fixes before its first step: which tokens each term trains, with what weight and what advantage.

Of one row alone, except where a term asks for the mean or deviation of the round or of a question's rows, or for the
round's most informative tokens: those are found over every row of every rank, so that neither micro-batches nor ranks
change them. Each term's advantages are made of its own rewards or log-ratios alone, so that whitening never sees the
sum of two terms. All of it is detached.

The order is the same for every baseline: return, baseline off it, whitening, clip, and last the weight of disagreement,
which therefore lies among the weights and not in the advantage; a baseline that needs logits is taken off, and the
clip made, in `core.tile`. A return counts the tokens that the term may train, which is its stretch of the row: a
horizon makes it the divergence of the prefix, in which no later token has a part. Tokens *chosen* among those
(`entropy_share`, `teacher_entropy`) are the ones that move, and each answers for the whole stretch; a reward belongs to
the row, whatever stretch of it is trained. `Objective.prepare` calls it.

Legend: C completion tokens of a row, J terms, R rows of this rank, G questions of the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from etude.axes.names import REFERENCE, REWARD, Baseline, Importance
from etude.core import estimators
from etude.core.records import Scored
from etude.core.reduction import row_weights
from etude.core.term import Term
from etude.core.transforms import extrapolated
from etude.core.weighting import disagreement_weights, informative_thresholds, informative_tokens, row_mask
from etude.errors import RecordError

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks."""
Gather = Callable[[Tensor], Tensor]
"""Puts the one-dimensional tensors of all ranks one after the other."""


def prepare(
    terms: Sequence[Term], scored: Sequence[Scored], *, step: int, total: Total, gather: Gather
) -> list[Scored]:
    """Every row with weights [J, C], advantages [J, C] and the number of tokens [J] each term chose from.

    Weights say which tokens are trained (not 0), what the reduction makes of them, and what their disagreement weighs.

    Args:
        terms: of the objective.
        scored: this rank's rows of the round.
        step: the round's first optimiser step, from 0; decides horizons.
        total: sums over all ranks; called by every rank alike, however many rows it has.
        gather: joins what all ranks have; likewise.

    Raises:
        RecordError: a row lacks a score, a reward, or what a term needs of the student, or a question has one row where
            a term compares its rows.
    """
    masks = [[_mask(term, row, step) for term in terms] for row in scored]
    # Before tokens are chosen: which rows are compared does not depend on what is worth training in them.
    rewards = [_rewards(term, scored, [of_row[j] for of_row in masks], total, gather) for j, term in enumerate(terms)]
    candidates = [torch.tensor([int(mask_C.sum()) for mask_C in of_row]) for of_row in masks]
    # Before tokens are chosen as well: a chosen token answers for all that follow in the term's stretch of the row.
    advantages = [
        [_returns(term, row, mask_C, rewards[j][r]) for j, (term, mask_C) in enumerate(zip(terms, of_row, strict=True))]
        for r, (row, of_row) in enumerate(zip(scored, masks, strict=True))
    ]
    for j, term in enumerate(terms):
        if term.chooses:
            _choose(term, scored, [of_row[j] for of_row in masks], gather)
    for j, term in enumerate(terms):
        if term.round_moments_needed:
            _centre(term, [of_row[j] for of_row in advantages], [of_row[j] for of_row in masks], total)
    return [
        row.with_prepared(
            weights=torch.stack([_weights(term, row, mask_C) for term, mask_C in zip(terms, of_row, strict=True)]),
            advantages=torch.stack([_clipped(*each) for each in zip(terms, values, of_row, strict=True)]),
            candidates=candidates_J,
        )
        for row, of_row, values, candidates_J in zip(scored, masks, advantages, candidates, strict=True)
    ]


def _mask(term: Term, row: Scored, step: int) -> Tensor:
    return row_mask(
        row.rollout,
        sources=term.sources,
        train_truncated=term.train_truncated,
        skip_first=term.skip_first,
        first_tokens=term.horizon_at(step),
        written_C=row.rollout.written,
    )


def _choose(term: Term, scored: Sequence[Scored], masks: Sequence[Tensor], gather: Gather) -> None:
    """Leave a term its informative tokens, in place; thresholds are the round's, over the tokens it trains."""
    marks = [_informative(term, row, mask_C) for row, mask_C in zip(scored, masks, strict=True)]

    def of_round(place: int) -> Tensor:
        trained = [mark_2C[place][mask_C] for mark_2C, mask_C in zip(marks, masks, strict=True)]
        return gather(torch.cat([torch.zeros(0), *trained]))

    entropy_threshold, disagreement_threshold = informative_thresholds(
        of_round(0),
        of_round(1),
        entropy_share=term.entropy_share or 0.0,
        disagreement_share=term.confident_wrong_share or 0.0,
    )
    for (entropy_C, c_C), mask_C in zip(marks, masks, strict=True):
        mask_C &= informative_tokens(
            student_entropy_n=entropy_C,
            disagreement_n=c_C,
            entropy_threshold=entropy_threshold,
            disagreement_threshold=disagreement_threshold,
        )


def _informative(term: Term, row: Scored, mask_C: Tensor) -> Tensor:
    """[2, C] student's entropy and log-ratio, as far as the term chooses by them and trains the row at all."""
    marks_2C = torch.zeros(2, *mask_C.shape)
    if not bool(mask_C.any()):
        return marks_2C
    if term.entropy_share is not None:
        if row.student_entropy is None:
            raise RecordError(
                f"term '{term.name}' chooses tokens by the student's entropy, which row {row.rollout.prompt.row} lacks"
            )
        marks_2C[0] = row.student_entropy
    if term.confident_wrong_share is not None:
        marks_2C[1] = log_ratios(term, row)
    return marks_2C


def log_ratios(term: Term, row: Scored) -> Tensor:
    """[C] log student - log target of the drawn tokens, the student as it was before the round's first step."""
    target_C = _drawn_logprobs(term, term.teacher, row)
    if term.extrapolation is not None:
        target_C = extrapolated(
            teacher_logprobs=target_C,
            reference_logprobs=_drawn_logprobs(term, REFERENCE, row),
            extrapolation=term.extrapolation,
        )
    if row.student_logprobs is None:
        raise RecordError(_lacking(term, term.teacher, row))
    _require_behaviour(term, row)
    return estimators.log_ratio(student_logprobs=row.student_logprobs, teacher_logprobs=target_C)


def _require_behaviour(term: Term, row: Scored) -> None:
    if term.importance is not Importance.NONE and row.rollout.behaviour_logprobs is None:
        raise RecordError(
            f"term '{term.name}' weighs row {row.rollout.prompt.row} by student / behaviour, and the row carries "
            "no behaviour_logprobs; take them from the sampler that wrote it"
        )


def _drawn_logprobs(term: Term, teacher: str, row: Scored) -> Tensor:
    """[C] what a teacher says of the drawn tokens."""
    scores = row.scores.get(teacher)
    if scores is None or scores.sampled_logprobs is None:
        raise RecordError(_lacking(term, teacher, row))
    return scores.sampled_logprobs


def _lacking(term: Term, teacher: str, row: Scored) -> str:
    return (
        f"term '{term.name}' needs the log-probabilities of student and teacher '{teacher}' for row "
        f"{row.rollout.prompt.row}; the row has scores of {sorted(row.scores)}"
    )


def _rewards(
    term: Term, scored: Sequence[Scored], masks: Sequence[Tensor], total: Total, gather: Gather
) -> list[float]:
    """Of each row the reward its tokens answer for, off its group's mean where asked; zero where there is none."""
    if term.teacher != REWARD:
        return [0.0] * len(scored)
    trained = [bool(mask_C.any()) for mask_C in masks]
    rewards = [_reward(term, row) if own else 0.0 for row, own in zip(scored, trained, strict=True)]
    if term.baseline is not Baseline.GROUP:
        return rewards
    return _off_their_groups(term, scored, trained, rewards, total, gather)


def _off_their_groups(
    term: Term,
    scored: Sequence[Scored],
    trained: Sequence[bool],
    rewards: Sequence[float],
    total: Total,
    gather: Gather,
) -> list[float]:
    """Rewards minus the mean of those of their question's rows that are trained; whitened, over their deviation."""
    groups_R = torch.tensor([row.rollout.prompt.question for row in scored], dtype=torch.int64)
    rows_G = torch.bincount(gather(groups_R))  # of all ranks, trained or not
    if bool((rows_G == 1).any()):
        raise RecordError(
            f"term '{term.name}' compares the rows of each question, and question {int((rows_G == 1).nonzero()[0])} of "
            "the round has one row; expected at least two (sampler.samples_per_prompt)"
        )
    rewards_R = torch.tensor(rewards, dtype=torch.float64)
    trained_R = torch.tensor(trained, dtype=torch.bool)
    sums_3G = estimators.group_sums(rewards_R[trained_R], groups_R[trained_R], len(rows_G))
    off_R = estimators.off_their_groups(rewards_R, groups_R, total(sums_3G), normalise=term.whiten)
    return [reward.item() for reward in off_R]


def _reward(term: Term, row: Scored) -> float:
    _require_behaviour(term, row)
    if row.reward is None:
        raise RecordError(
            f"term '{term.name}' trains row {row.rollout.prompt.row} by its reward, and the row has none; let a "
            "verifier judge it"
        )
    return row.reward


def _returns(term: Term, row: Scored, mask_C: Tensor, reward: float) -> Tensor:
    """[C] returns of r = -c over the tokens the term may train, or of a reward at the row's end; zero where idle."""
    if not (term.rewards_needed and bool(mask_C.any())):
        return torch.zeros(mask_C.shape)
    if term.teacher == REWARD:
        rewards_C = torch.zeros(mask_C.shape)
        rewards_C[-1] = reward  # at the end, whoever wrote the last token
        counted_C = row.rollout.written
    else:  # what a tool wrote, what is skipped and what lies beyond the horizon earns nothing
        rewards_C = torch.where(mask_C, -log_ratios(term, row), 0.0)
        counted_C = mask_C
    returns_C = estimators.returns(rewards_C, term.discount)
    return estimators.length_normalised(returns_C, counted_C) if term.length_normalise else returns_C


def _centre(term: Term, values: list[Tensor], masks: list[Tensor], total: Total) -> None:
    """Take the round's mean off one term's returns, in place; divide by the deviation where the term whitens."""
    sums = [estimators.moment_sums(values_C, mask_C) for values_C, mask_C in zip(values, masks, strict=True)]
    of_round = total(torch.stack(sums).sum(0) if sums else torch.zeros(3, dtype=torch.float64))
    if of_round[0] == 0:
        return
    mean, deviation = estimators.from_sums(of_round)
    for values_C in values:
        centred = estimators.whitened(values_C, mean, deviation) if term.whiten else values_C - mean
        values_C.copy_(centred)


def _clipped(term: Term, values_C: Tensor, mask_C: Tensor) -> Tensor:
    """The last thing that happens to an advantage; where the tile takes a baseline off, it clips afterwards."""
    if not (term.rewards_needed and bool(mask_C.any())):
        return torch.zeros_like(values_C)
    if term.advantage_clip is not None and term.baseline is not Baseline.STATE_KL:
        values_C = estimators.clip_advantages(values_C, term.advantage_clip)
    return values_C


def _weights(term: Term, row: Scored, mask_C: Tensor) -> Tensor:
    """[C] what the reduction says, times what the disagreement says: every estimator is in proportion to advantages."""
    weights_C = row_weights(mask_C, term.reduction)
    if term.disagreement_weight is None or not bool(mask_C.any()):
        return weights_C
    return weights_C * disagreement_weights(log_ratios(term, row), largest=term.disagreement_weight, mask_C=mask_C)
