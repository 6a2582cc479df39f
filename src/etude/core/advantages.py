"""What a round fixes before its first step: which tokens each term trains, with what weight and what advantage.

Of one row alone, except where a term asks for the mean or deviation of the round or of a question's rows: those are
sums over every row of every rank, so that neither micro-batches nor ranks change them. Each term's advantages are made
of its own rewards or log-ratios alone, so that whitening never sees the sum of two terms. All of it is detached.
`Objective.prepare` calls it; what needs logits as they are in a step belongs to `core.tile`.

Legend: C completion tokens of a row, J terms, R rows of this rank, G questions of the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from etude.axes.names import REWARD, Baseline, Importance
from etude.core import estimators
from etude.core.records import Scored
from etude.core.reduction import row_weights
from etude.core.term import Term
from etude.core.weighting import disagreement_weights, row_mask
from etude.errors import RecordError

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks."""


def prepare(terms: Sequence[Term], scored: Sequence[Scored], *, step: int, total: Total) -> list[Scored]:
    """Every row with weights [J, C] and advantages [J, C].

    Args:
        terms: of the objective.
        scored: this rank's rows of the round.
        step: the round's first optimiser step, from 0; decides horizons.
        total: sums over all ranks; called by every rank alike, however many rows it has.

    Raises:
        RecordError: a row lacks a score, a reward, or the student's log-probabilities a term needs, or a question has
            one row where a term compares its rows.
    """
    masks = [[_mask(term, row, step) for term in terms] for row in scored]
    rewards = [_rewards(term, scored, [of_row[j] for of_row in masks], total) for j, term in enumerate(terms)]
    advantages = [
        [_returns(term, row, mask_C, rewards[j][r]) for j, (term, mask_C) in enumerate(zip(terms, of_row, strict=True))]
        for r, (row, of_row) in enumerate(zip(scored, masks, strict=True))
    ]
    for j, term in enumerate(terms):
        if term.round_moments_needed:
            _centre(term, [of_row[j] for of_row in advantages], [of_row[j] for of_row in masks], total)
    return [
        row.with_prepared(
            weights=torch.stack(
                [row_weights(mask_C, term.reduction) for term, mask_C in zip(terms, of_row, strict=True)]
            ),
            advantages=torch.stack(
                [_shaped(*each, row) for each in zip(terms, values, of_row, strict=True)],
            ),
        )
        for row, of_row, values in zip(scored, masks, advantages, strict=True)
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


def log_ratios(term: Term, row: Scored) -> Tensor:
    """[C] log student - log teacher of the drawn tokens, the student as it was before the round's first step."""
    scores = row.scores.get(term.teacher)
    if scores is None or scores.sampled_logprobs is None or row.student_logprobs is None:
        raise RecordError(
            f"term '{term.name}' needs the log-probabilities of student and teacher '{term.teacher}' for row "
            f"{row.rollout.prompt.row}; the row has scores of {sorted(row.scores)}"
        )
    _require_behaviour(term, row)
    return estimators.log_ratio(student_logprobs=row.student_logprobs, teacher_logprobs=scores.sampled_logprobs)


def _require_behaviour(term: Term, row: Scored) -> None:
    if term.importance is not Importance.NONE and row.rollout.behaviour_logprobs is None:
        raise RecordError(
            f"term '{term.name}' weighs row {row.rollout.prompt.row} by student / behaviour, and the row carries "
            "no behaviour_logprobs; take them from the sampler that wrote it"
        )


def _rewards(term: Term, scored: Sequence[Scored], masks: Sequence[Tensor], total: Total) -> list[float]:
    """Of each row the reward its tokens answer for, off its group's mean where asked; zero where there is none."""
    if term.teacher != REWARD:
        return [0.0] * len(scored)
    trained = [bool(mask_C.any()) for mask_C in masks]
    rewards = [_reward(term, row) if own else 0.0 for row, own in zip(scored, trained, strict=True)]
    return _off_their_groups(term, scored, trained, rewards, total) if term.baseline is Baseline.GROUP else rewards


def _off_their_groups(
    term: Term, scored: Sequence[Scored], trained: Sequence[bool], rewards: Sequence[float], total: Total
) -> list[float]:
    """Rewards minus the mean of those of their question's rows that are trained; whitened, over their deviation."""
    questions = [row.rollout.prompt.question for row in scored]
    num_groups = _above_all(questions, total)
    groups_R = torch.tensor(questions, dtype=torch.int64)
    rewards_R = torch.tensor(rewards, dtype=torch.float64)
    trained_R = torch.tensor(trained, dtype=torch.bool)
    rows_1G = torch.bincount(groups_R, minlength=num_groups)[None].double()
    sums_3G = estimators.group_sums(rewards_R[trained_R], groups_R[trained_R], num_groups)
    of_round = total(torch.cat([rows_1G, sums_3G]))
    alone_G = of_round[0] == 1
    if bool(alone_G.any()):
        raise RecordError(
            f"term '{term.name}' compares the rows of each question, and question {int(alone_G.nonzero()[0])} of the "
            "round has one row; expected at least two (sampler.samples_per_prompt)"
        )
    mean_G, deviation_G = estimators.group_moments(of_round[1:])
    centred_R = rewards_R - mean_G[groups_R]
    if term.whiten:
        deviation_R = deviation_G[groups_R]
        centred_R = torch.where(deviation_R > 0, centred_R / deviation_R, 0.0)
    return [reward.item() for reward in centred_R]


def _reward(term: Term, row: Scored) -> float:
    _require_behaviour(term, row)
    if row.reward is None:
        raise RecordError(
            f"term '{term.name}' trains row {row.rollout.prompt.row} by its reward, and the row has none; let a "
            "verifier judge it"
        )
    return row.reward


def _above_all(numbers: Sequence[int], total: Total) -> int:
    """A number above those of all ranks. Ranks can only add up, so each marks how many bits its largest has."""
    marks = torch.zeros(64, dtype=torch.float64)
    marks[max(numbers, default=0).bit_length()] = 1.0
    return 2 ** int(total(marks).nonzero().max())


def _returns(term: Term, row: Scored, mask_C: Tensor, reward: float) -> Tensor:
    """[C] returns of r = -c over the tokens the student wrote, or of a reward at the row's end; zero where idle."""
    if not (term.rewards_needed and bool(mask_C.any())):
        return torch.zeros(mask_C.shape)
    if term.teacher == REWARD:
        rewards_C = torch.zeros(mask_C.shape)
        rewards_C[-1] = reward
    else:
        rewards_C = -log_ratios(term, row)
        if row.rollout.written is not None:  # what a tool wrote earns nothing
            rewards_C = torch.where(row.rollout.written, rewards_C, 0.0)
    returns_C = estimators.returns(rewards_C, term.discount)
    return estimators.length_normalised(returns_C, row.rollout.written) if term.length_normalise else returns_C


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


def _shaped(term: Term, values_C: Tensor, mask_C: Tensor, row: Scored) -> Tensor:
    """Clipped and weighed, the last two things that happen to an advantage."""
    if not (term.rewards_needed and bool(mask_C.any())):
        return torch.zeros_like(values_C)
    if term.advantage_clip is not None and term.baseline is not Baseline.STATE_KL:  # there the tile clips
        values_C = estimators.clip_advantages(values_C, term.advantage_clip)
    if term.disagreement_weight is not None:
        c_C = log_ratios(term, row)
        values_C = values_C * disagreement_weights(c_C, largest=term.disagreement_weight, mask_C=mask_C)
    return values_C
