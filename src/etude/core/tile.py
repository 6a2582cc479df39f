"""The terms of an objective on the logits of a few tokens: differentiable values, and sums for the log.

Called by `Objective` for every tile of tokens that `core.linear` cuts, so that nothing here may depend on the cut. It
knows no row: weights and advantages come with the batch, made by `core.advantages` before the round's first step.

Legend: n tokens of the tile, V vocabulary, J terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.axes.names import LABEL, REFERENCE, REWARD, Baseline, Estimator, Form, Importance, Support, Tail
from etude.core import estimators, support
from etude.core.divergences import DivergenceFn, reverse_kl
from etude.core.records import Batch
from etude.core.term import Term
from etude.core.transforms import extrapolated
from etude.core.weighting import entropy, entropy_gate
from etude.errors import PairError


@dataclass(frozen=True, eq=False, slots=True)
class Tile:
    """A few tokens: both sides' log-probabilities, and where in the batch they are."""

    student_nV: Tensor  # [n, V] float32, differentiable
    teachers_nV: Mapping[str, Tensor]  # by name, [n, V] float32
    chosen_n: Tensor  # [n] the student's log-probability of the batch's own token
    tokens: slice  # which of the batch's N tokens
    batch: Batch


@dataclass(frozen=True, eq=False, slots=True)
class Marks:
    """What one term makes of a tile."""

    values_n: Tensor  # [n] differentiable, before weight and coefficient
    shown_n: Tensor | None  # [n] the divergence they stand for, for the log; None: a reward, which is no divergence
    shares: Mapping[str, Tensor]  # [n] each, by the names of `shares_of`


def shares_of(term: Term) -> tuple[str, ...]:
    """Names of what a term reports beside its divergence, means over its trained tokens."""
    names = ("clipped",) if term.clip is not None or term.bounds is not None else ()
    if term.support is Support.TOP_K:
        names += ("teacher_mass", "student_mass", "overlap")
    return names if term.teacher_entropy is None else (*names, "uncertain")


def mark(term: Term, divergence: DivergenceFn, tile: Tile, advantages_n: Tensor) -> Marks:
    """One term on one tile.

    Raises:
        PairError: its teacher did not give what it needs, or the vocabulary is smaller than its top_k.
    """
    marks = _marks(term, divergence, tile, advantages_n)
    if term.teacher_entropy is None:
        return marks
    gate_n = entropy_gate(entropy(_target(term, tile)), term.teacher_entropy)
    # The count stays that of all tokens: the mean of gate times divergence, whatever share the gate lets through.
    return Marks(marks.values_n * gate_n, marks.shown_n, {**marks.shares, "uncertain": gate_n})


def _target(term: Term, tile: Tile) -> Tensor:
    """[n, V] log-probabilities of what the term compares with: its teacher, or p^lambda ref^(1 - lambda)."""
    target_nV = _unscaled_target(term, tile)
    return target_nV if term.extrapolation is None else target_nV.log_softmax(-1)


def _unscaled_target(term: Term, tile: Tile) -> Tensor:
    """[n, V] the same as drawn tokens know it, not summing to one."""
    teacher_nV = tile.teachers_nV[term.teacher]
    if term.extrapolation is None:
        return teacher_nV
    return extrapolated(
        teacher_logprobs=teacher_nV,
        reference_logprobs=tile.teachers_nV[REFERENCE],
        extrapolation=term.extrapolation,
    )


def _marks(term: Term, divergence: DivergenceFn, tile: Tile, advantages_n: Tensor) -> Marks:
    if term.teacher == LABEL:
        return Marks(-tile.chosen_n, -tile.chosen_n, {})
    if term.teacher == REWARD:
        return _policy(term, tile, advantages_n, None)
    if term.support is Support.FULL:
        values_n = divergence(student_logprobs=tile.student_nV, teacher_logprobs=_target(term, tile))
        return Marks(values_n, values_n, {})
    if term.support is Support.TOP_K:
        return _top_k(term, divergence, tile)
    return _drawn(term, tile, advantages_n)


def _top_k(term: Term, divergence: DivergenceFn, tile: Tile) -> Marks:
    """The likeliest ids of one side or both, and how much of each side they hold."""
    assert term.top_k is not None  # the term checks its own fields
    assert term.owner is not None
    assert term.tail is not None
    teacher_nV = _target(term, tile)
    k, vocab_size = term.top_k, teacher_nV.shape[-1]
    if k > vocab_size:
        raise PairError(f"term '{term.name}' keeps {k} ids a side and there are {vocab_size}; lower its top_k")
    tops = {"student_top_nk": support.top_ids(tile.student_nV, k), "teacher_top_nk": support.top_ids(teacher_nV, k)}
    ids_nK = support.kept_ids(**tops, owner=term.owner)
    sampled = term.tail is Tail.SAMPLED
    values_n = support.top_k_divergence(
        reverse_kl if sampled else divergence,
        student_logprobs_nV=tile.student_nV,
        teacher_logprobs_nV=teacher_nV,
        ids_nK=ids_nK,
        tail=term.tail,
        drawn_ids_n=tile.batch.target_ids_N[tile.tokens] if sampled else None,
    )
    shares = {
        "teacher_mass": support.kept_mass(teacher_nV, ids_nK),
        "student_mass": support.kept_mass(tile.student_nV, ids_nK),
        "overlap": support.overlap(**tops),
    }
    return Marks(values_n, values_n, shares)


def _drawn(term: Term, tile: Tile, advantages_n: Tensor) -> Marks:
    """The drawn token alone: a form of its log-ratio, or its detached advantage."""
    target_n = _drawn_logprobs(term, term.teacher, tile)
    if term.extrapolation is not None:
        target_n = extrapolated(
            teacher_logprobs=target_n,
            reference_logprobs=_drawn_logprobs(term, REFERENCE, tile),
            extrapolation=term.extrapolation,
        )
    c_n = estimators.log_ratio(student_logprobs=tile.chosen_n, teacher_logprobs=target_n)
    if term.estimator is Estimator.ANALYTIC:
        return Marks(estimators.form_value(c_n, term.form or Form.K2), c_n, {})
    if term.baseline is Baseline.STATE_KL:
        # Unscaled as in the advantages, so that it is their mean.
        student_nV, target_nV = tile.student_nV.detach(), _unscaled_target(term, tile)
        advantages_n = advantages_n + reverse_kl(student_logprobs=student_nV, teacher_logprobs=target_nV)
        if term.advantage_clip is not None:
            advantages_n = estimators.clip_advantages(advantages_n, term.advantage_clip)
    return _policy(term, tile, advantages_n, c_n)


def _policy(term: Term, tile: Tile, advantages_n: Tensor, shown_n: Tensor | None) -> Marks:
    """Each drawn token's own advantage, corrected for who drew it."""
    behaviour_n = tile.batch.behaviour_logprobs_N[tile.tokens]
    values_n = estimators.policy_gradient(
        student_logprobs=tile.chosen_n,
        behaviour_logprobs=behaviour_n,
        advantages=advantages_n,
        importance=term.importance,
        clip=term.clip,
        bounds=term.bounds,
    )
    return Marks(values_n, shown_n, _cut(term, tile.chosen_n.detach(), behaviour_n, advantages_n))


def _drawn_logprobs(term: Term, teacher: str, tile: Tile) -> Tensor:
    """[n] what a teacher says of the drawn tokens."""
    columns = tile.batch.teachers.get(teacher)
    if columns is None or columns.sampled_logprobs_N is None:
        raise PairError(
            f"teacher '{teacher}' gave no log-probabilities of the drawn ids; term '{term.name}' needs them"
        )
    return columns.sampled_logprobs_N[tile.tokens]


def _cut(term: Term, chosen_n: Tensor, behaviour_n: Tensor, advantages_n: Tensor) -> dict[str, Tensor]:
    if term.importance in (Importance.NONE, Importance.RATIO):
        return {}
    ratio_n = estimators.importance_ratio(student_logprobs=chosen_n, behaviour_logprobs=behaviour_n)
    cut_n = estimators.cut(
        ratio=ratio_n, advantages=advantages_n, importance=term.importance, clip=term.clip, bounds=term.bounds
    )
    return {"clipped": cut_n}


def shared_sums(tile: Tile, temperature: float) -> list[Tensor]:
    """What is logged once for all terms: entropy and log-probability of the student, and the sampler's distance."""
    student_nV, chosen_n = tile.student_nV.detach(), tile.chosen_n.detach()
    scored_n = (tile.batch.weights_JN[:, tile.tokens] != 0).any(dim=0)  # a batch without work holds one idle token
    raw_n = tile.batch.raw_logprobs_N[tile.tokens]
    # The student's rows with the sampler's log-probabilities, which are comparable at temperature 1 only.
    written_n = scored_n & ~torch.isnan(raw_n) & (temperature == 1.0)
    gap_n = torch.where(written_n, (chosen_n - raw_n).abs(), 0.0)
    return [
        (entropy(student_nV) * scored_n).sum(),
        (chosen_n * scored_n).sum(),
        scored_n.sum(),
        gap_n.sum(),
        written_n.sum(),
    ]
