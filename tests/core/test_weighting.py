"""Masks from recorded facts, and weights against values worked out by hand; none of them carries a gradient."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.axes.names import FinishReason, Source
from etude.core.divergences import LOG_OF_ZERO
from etude.core.records import Prompt, Rollout, as_ids
from etude.core.weighting import (
    disagreement_weights,
    entropy,
    entropy_gate,
    id_mask,
    informative_thresholds,
    informative_tokens,
    is_right,
    perplexity_weights,
    position_mask,
    row_mask,
    share_threshold,
)

EVERYBODY = frozenset(Source)


def written(ids: list[int], finish_reason: FinishReason, source: Source = Source.STUDENT) -> Rollout:
    return Rollout(Prompt(as_ids([7, 2, 7]), row=0), as_ids(ids), source, finish_reason, version=0)


@pytest.mark.parametrize(
    ("sampled", "finish_reason", "trained"),
    [([5, 6, 2], FinishReason.STOP, 3), ([5, 6, 7, 8, 9], FinishReason.LENGTH, 5), ([2], FinishReason.STOP, 1)],
)
def test_stop_id_is_trained_and_none_is_invented(sampled: list[int], finish_reason: FinishReason, trained: int) -> None:
    """Pad and stop share id 2, here and inside the prompt: what was written is what is trained, whatever its ids."""
    mask = row_mask(written(sampled, finish_reason), sources=EVERYBODY, train_truncated=True)
    assert mask.tolist() == [True] * trained


def test_cut_rows_are_left_out_on_request() -> None:
    cut, stopped = written([5, 6, 7, 8], FinishReason.LENGTH), written([5, 6, 2], FinishReason.STOP)
    assert row_mask(cut, sources=EVERYBODY, train_truncated=False).tolist() == [False] * 4
    assert row_mask(stopped, sources=EVERYBODY, train_truncated=False).tolist() == [True] * 3


@pytest.mark.parametrize("source", list(Source))
def test_only_the_named_sources_are_trained(source: Source) -> None:
    row = written([5, 2], FinishReason.STOP, source)
    assert row_mask(row, sources={source}, train_truncated=True).all()
    assert not row_mask(row, sources=EVERYBODY - {source}, train_truncated=True).any()


# Positions, ids, provenance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skip_first", "first_tokens", "expected"),
    [
        (0, None, [1, 1, 1, 1]),
        (2, None, [0, 0, 1, 1]),
        (9, None, [0, 0, 0, 0]),
        (0, 1, [1, 0, 0, 0]),
        (0, 4, [1, 1, 1, 1]),
        (0, 99, [1, 1, 1, 1]),
        (1, 3, [0, 1, 1, 0]),
    ],
)
def test_positions(skip_first: int, first_tokens: int | None, expected: list[int]) -> None:
    mask = position_mask(4, skip_first=skip_first, first_tokens=first_tokens)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [bool(x) for x in expected]


def test_a_horizon_grows_and_takes_no_token_back() -> None:
    masks = [position_mask(6, first_tokens=horizon) for horizon in range(1, 8)]
    assert [int(mask.sum()) for mask in masks] == [1, 2, 3, 4, 5, 6, 6]
    assert all((later | ~earlier).all() for earlier, later in pairwise(masks))


@pytest.mark.parametrize(
    ("positions", "sentence"),
    [
        ({"skip_first": -1}, "skip_first is -1"),
        ({"first_tokens": 0}, "first_tokens is 0 with skip_first 0"),
        ({"skip_first": 3, "first_tokens": 3}, "first_tokens is 3 with skip_first 3"),
    ],
)
def test_positions_no_row_has(positions: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        position_mask(4, **positions)


def test_ids_are_left_out_wherever_they_stand() -> None:
    assert id_mask(as_ids([5, 1, 5, 2, 1]), [1]).tolist() == [True, False, True, True, False]
    assert id_mask(as_ids([5, 1]), []).tolist() == [True, True]
    with pytest.raises(ValueError, match=r"ids to leave out are \[-100, 3\]"):
        id_mask(as_ids([5, 1]), {3, -100})


def test_all_conditions_of_a_row_hold_together() -> None:
    """Positions 1 to 5 of seven; of those 9 is special, and 4 came from a tool: 1, 3 and 5 are left."""
    row = written([6, 6, 9, 6, 6, 6, 2], FinishReason.STOP)
    by_the_writer = torch.tensor([True, True, True, True, False, True, True])
    conditions: dict[str, Any] = {
        "skip_first": 1,
        "first_tokens": 6,
        "left_out_ids": {9},
        "written_C": by_the_writer,
        "train_truncated": False,
    }
    assert row_mask(row, sources=EVERYBODY, **conditions).nonzero().flatten().tolist() == [1, 3, 5]
    assert not row_mask(row, sources={Source.TEACHER}, **conditions).any()
    assert by_the_writer.sum() == 6  # read, not written to


def test_a_tool_wrote_it() -> None:
    row = written([6, 7, 8, 2], FinishReason.STOP)
    by_the_writer = torch.tensor([True, False, False, True])
    mask = row_mask(row, sources=EVERYBODY, train_truncated=True, written_C=by_the_writer)
    assert mask.tolist() == [True, False, False, True]


@pytest.mark.parametrize("written_C", [torch.ones(3, dtype=torch.bool), torch.ones(4), torch.ones(1, 4).bool()])
def test_provenance_of_another_row(written_C: Tensor) -> None:
    row = written([6, 7, 8, 2], FinishReason.STOP)
    with pytest.raises(ValueError, match="expected one bool for each of its 4 completion tokens"):
        row_mask(row, sources=EVERYBODY, train_truncated=True, written_C=written_C)


# Weights of a row -----------------------------------------------------------------------------------------------------


def test_by_correctness() -> None:
    assert [is_right(score) for score in (0.0, 0.4, 0.5, 0.9, 1.0)] == [False, False, True, True, True]


@pytest.mark.parametrize("score", [-0.1, 1.1, math.nan])
def test_a_score_is_a_share(score: float) -> None:
    with pytest.raises(ValueError, match="the verifier's score is"):
        is_right(score)


def by_perplexity(perplexities: list[float], groups: list[int], power: float, own: slice = slice(None)) -> Tensor:
    """Of the rows in `own`, out of a round whose rows have these perplexities."""
    means_N, groups_N = -torch.tensor(perplexities, dtype=torch.float64).log(), torch.tensor(groups)
    return perplexity_weights(
        means_N[own], groups_N[own], power=power, round_logprobs_N=means_N, round_groups_N=groups_N
    )


@pytest.mark.parametrize(
    ("power", "expected"),
    [
        (1.0, [1 / 3, 1.6, 4 / 3, 0.4, 4 / 3]),  # group 0: 1, 4, 4 of 9, times 3 rows; group 1: 8, 2 of 10, times 2
        (-1.0, [2.0, 0.4, 0.5, 1.6, 0.5]),  # 1, 1/4, 1/4 of 3/2; 1/8, 1/2 of 5/8
        (0.5, [0.6, 4 / 3, 1.2, 2 / 3, 1.2]),  # 1, 2, 2 of 5; 2 to 1
    ],
)
def test_by_perplexity(power: float, expected: list[float]) -> None:
    perplexities, groups = [1.0, 8.0, 4.0, 2.0, 4.0], [0, 1, 0, 1, 0]
    assert by_perplexity(perplexities, groups, power).tolist() == pytest.approx(expected, abs=1e-12)
    for own in (slice(0, 2), slice(2, 5), slice(0, 0)):  # as the rows of ranks
        assert by_perplexity(perplexities, groups, power, own).tolist() == pytest.approx(expected[own], abs=1e-12)


@pytest.mark.parametrize("groups", [[0, 0, 0, 0], [0, 1, 2, 3], [5, 2, 2, 2]])
def test_perplexity_weights_have_mean_one_in_each_group(groups: list[int]) -> None:
    weights = by_perplexity([1.5, 2.0, 9.0, 3.0], groups, power=1 / 0.7)
    for group in set(groups):
        assert weights[torch.tensor(groups) == group].mean().item() == pytest.approx(1.0, abs=1e-12)


def test_an_impossible_row_gives_no_nan() -> None:
    assert by_perplexity([math.inf, 2.0, 1.0, 1.0], [0, 0, 1, 1], 1.0).tolist() == [2.0, 0.0, 1.0, 1.0]
    assert by_perplexity([math.inf, 2.0, 1.0, 1.0], [0, 0, 1, 1], -1.0).tolist() == [0.0, 2.0, 1.0, 1.0]


def test_nobody_to_weigh() -> None:
    assert by_perplexity([], [], 1.0).shape == (0,)


def test_perplexities_that_do_not_fit() -> None:
    for power in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="power of the perplexity is"):
            by_perplexity([1.0], [0], power)
    with pytest.raises(ValueError, match=r"shapes \(1,\) and \(2,\), of the round \(2,\) and \(2,\)"):
        perplexity_weights(
            torch.zeros(1),
            torch.zeros(2, dtype=torch.int64),
            power=1.0,
            round_logprobs_N=torch.zeros(2),
            round_groups_N=torch.zeros(2, dtype=torch.int64),
        )


# Disagreement ---------------------------------------------------------------------------------------------------------


def test_disagreement_of_the_worked_example() -> None:
    """|c| = 0, 2 ln 2, ln 2: before each token 0, 0 and two thirds of it are used up."""
    weights = disagreement_weights(torch.tensor([0.0, 1.386294, -0.693147]))
    assert weights.tolist() == pytest.approx([1.5, 1.5, 1.166667], abs=1e-5)


def test_disagreement_falls_from_the_largest_towards_one() -> None:
    """|c| = 1, 2, 1: used up before each 0, 1/4, 3/4; largest 3 gives 1 + 2 (1, 3/4, 1/4)."""
    assert disagreement_weights(torch.tensor([-1.0, 2.0, 1.0]), largest=3.0).tolist() == [3.0, 2.5, 1.5]
    assert disagreement_weights(torch.tensor([-1.0, 2.0, 1.0]), largest=1.0).tolist() == [1.0, 1.0, 1.0]
    noise = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = disagreement_weights(noise)
    assert (weights.diff() <= 0).all()
    assert weights[0] == 1.5
    assert (weights > 1.0).all()


def test_masked_equals_removed() -> None:
    c, mask = torch.tensor([3.0, 1.0, math.nan, 2.0, -1.0]), torch.tensor([False, True, False, True, True])
    assert disagreement_weights(c, mask_C=mask)[mask].tolist() == disagreement_weights(c[mask]).tolist()
    assert disagreement_weights(c, mask_C=mask).isfinite().all()  # zero times NaN would reach the loss


@pytest.mark.parametrize("seed", range(8))
def test_disagreement_summed_token_by_token(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    c, mask = torch.randn(9, generator=generator, dtype=torch.float64), torch.rand(9, generator=generator) > 0.4
    sizes = [abs(value) if trained else 0.0 for value, trained in zip(c.tolist(), mask.tolist(), strict=True)]
    expected = [1.0 + 0.8 * (1.0 - sum(sizes[:t]) / sum(sizes)) for t in range(9)]
    assert disagreement_weights(c, largest=1.8, mask_C=mask).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mask", [None, torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.bool)])
def test_without_disagreement_none_is_used_up(mask: Tensor | None) -> None:
    c = torch.zeros(3) if mask is None else torch.where(mask, 0.0, 5.0)
    assert disagreement_weights(c, mask_C=mask).tolist() == [1.5, 1.5, 1.5]


def test_disagreement_about_an_impossible_token() -> None:
    """It counts with 1e4 nats: nearly all of the row's disagreement, and no NaN."""
    weights = disagreement_weights(torch.tensor([1.0, math.inf, -math.inf, 1.0]))
    assert weights.tolist() == pytest.approx([1.5, 1.5, 1.25, 1.0], abs=1e-4)


def test_disagreement_of_no_token_and_in_half_precision() -> None:
    assert disagreement_weights(torch.zeros(0)).shape == (0,)
    weights = disagreement_weights(torch.tensor([1.0, 2.0, 1.0], dtype=torch.bfloat16))
    assert weights.dtype == torch.float32
    assert weights.tolist() == [1.5, 1.375, 1.125]


def test_disagreements_that_are_refused() -> None:
    with pytest.raises(ValueError, match="largest disagreement weight is 0.9"):
        disagreement_weights(torch.ones(2), largest=0.9)
    with pytest.raises(ValueError, match=r"mask has shape \(1,\) and the log-ratios \(2,\)"):
        disagreement_weights(torch.ones(2), mask_C=torch.ones(1).bool())
    with pytest.raises(ValueError, match="the log-ratio has 1 NaN among 2 values"):
        disagreement_weights(torch.tensor([1.0, math.nan]))


# Entropy --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ([0.5, 0.25, 0.125, 0.125], 1.75 * math.log(2)),
        ([0.25] * 4, math.log(4)),
        ([0.5, 0.5, 0.0, 0.0], math.log(2)),
        ([0.0, 1.0, 0.0, 0.0], 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_entropy(probabilities: list[float], expected: float, dtype: torch.dtype) -> None:
    logprobs = torch.tensor([probabilities, probabilities], dtype=torch.float64).log().to(dtype)
    found = entropy(logprobs)
    assert found.dtype == torch.promote_types(torch.float32, dtype)
    assert found.tolist() == pytest.approx([expected] * 2, abs=1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_entropy_leaves_its_input_alone() -> None:
    logprobs = torch.tensor([[0.5, 0.5, 0.0]]).log()
    entropy(logprobs)
    assert logprobs.exp().tolist() == [[0.5, 0.5, 0.0]]


def test_the_gate_opens_above_its_threshold() -> None:
    assert entropy_gate(torch.tensor([0.0, 0.5, 0.75]), 0.5).tolist() == [False, False, True]
    assert entropy_gate(torch.tensor([0.0, 0.5, 0.75]), 0.0).tolist() == [False, True, True]
    with pytest.raises(ValueError, match="entropy threshold is -0.5"):
        entropy_gate(torch.tensor([1.0]), -0.5)


# Informative tokens ---------------------------------------------------------------------------------------------------

ENTROPY = torch.tensor([2.0, 0.1, 1.0, 0.3, 0.2, 0.9])
WRONG = torch.tensor([0.0, 5.0, 9.0, -6.0, 1.0, 0.5])


def informative(entropies: Tensor, wrong: Tensor, thresholds: tuple[float, float]) -> Tensor:
    return informative_tokens(
        student_entropy_n=entropies,
        disagreement_n=wrong,
        entropy_threshold=thresholds[0],
        disagreement_threshold=thresholds[1],
    )


@pytest.mark.parametrize(
    ("thresholds", "kept"),
    [
        ((1.0, 5.0), [0, 1, 2]),  # two uncertain tokens, and the confident one that is wrong by 5
        ((1.0, math.inf), [0, 2]),
        ((math.inf, 5.0), [1, 2]),
        ((math.inf, math.inf), []),
        ((0.0, math.inf), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_uncertain_or_confident_and_wrong(thresholds: tuple[float, float], kept: list[int]) -> None:
    assert informative(ENTROPY, WRONG, thresholds).nonzero().flatten().tolist() == kept


def test_thresholds_of_a_round() -> None:
    """The three largest entropies are 2, 1, 0.9; the confident three are wrong by 5, -6, 1, and one is kept."""
    thresholds = informative_thresholds(ENTROPY, WRONG, entropy_share=0.5, disagreement_share=1 / 3)
    assert thresholds == (pytest.approx(0.9), 5.0)
    assert informative(ENTROPY, WRONG, thresholds).tolist() == [True, True, True, False, False, True]


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_micro_batches_keep_the_same_tokens(size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    entropies, wrong = torch.rand(64, generator=generator), torch.randn(64, generator=generator)
    thresholds = informative_thresholds(entropies, wrong, entropy_share=0.5, disagreement_share=0.25)
    whole = informative(entropies, wrong, thresholds)
    pieces = [informative(*piece, thresholds) for piece in zip(entropies.split(size), wrong.split(size), strict=True)]
    assert torch.cat(pieces).equal(whole)
    assert whole.sum() == 32 + 8


@pytest.mark.parametrize(
    ("share", "reached"), [(0.0, 0), (0.04, 0), (0.05, 1), (0.1, 1), (0.7, 7), (0.75, 8), (1.0, 10)]
)
def test_a_share_of_different_values(share: float, reached: int) -> None:
    values = torch.arange(10.0).flip(0)
    assert (values >= share_threshold(values, share)).sum() == reached


def test_shares_of_equal_none_and_impossible_values() -> None:
    assert share_threshold(torch.tensor([1.0, 2.0, 2.0, 2.0]), 0.25) == 2.0
    assert share_threshold(torch.zeros(0), 0.5) == math.inf
    impossible = torch.tensor([math.inf, 0.0, 0.0, 0.0])
    threshold = share_threshold(impossible, 0.25)
    assert threshold == -LOG_OF_ZERO
    assert informative(torch.zeros(4), impossible, (1.0, threshold)).tolist() == [True, False, False, False]
    assert not informative(torch.zeros(4), impossible, (1.0, math.inf)).any()


def test_shares_and_shapes_that_are_refused() -> None:
    with pytest.raises(ValueError, match="share of tokens to keep is 1.5"):
        share_threshold(torch.ones(3), 1.5)
    with pytest.raises(ValueError, match="chosen by has 1 NaN among 2 values"):
        share_threshold(torch.tensor([1.0, math.nan]), 0.5)
    with pytest.raises(ValueError, match=r"shape \(3,\) and the disagreement \(2,\)"):
        informative_thresholds(torch.ones(3), torch.ones(2), entropy_share=0.5, disagreement_share=0.5)


# No gradient ----------------------------------------------------------------------------------------------------------


def test_no_weight_carries_a_gradient() -> None:
    """Made of numbers that do: a weight that could be trained would be trained towards zero."""
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(2)).requires_grad_()
    logprobs = logits.log_softmax(-1)
    c = logprobs[:, 0] + 1.0
    student_entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert c.requires_grad
    assert student_entropy.requires_grad
    made = [
        entropy(logprobs),
        entropy_gate(student_entropy, 0.5),
        disagreement_weights(c),
        disagreement_weights(c, mask_C=c > 0),
        informative(student_entropy, c, (0.5, 0.5)),
        perplexity_weights(c, torch.zeros(4), power=1.0, round_logprobs_N=c, round_groups_N=torch.zeros(4)),
    ]
    assert [weight.requires_grad for weight in made] == [False] * len(made)
    thresholds = informative_thresholds(student_entropy, c, entropy_share=0.5, disagreement_share=0.5)
    assert all(isinstance(threshold, float) for threshold in thresholds)
