"""Counting, and the only division."""

from __future__ import annotations

import pytest
import torch

from etude.axes.names import Reduction
from etude.core.reduction import row_count, row_weights, term_scales


def masks(*lengths: int) -> list[torch.Tensor]:
    return [torch.ones(length, dtype=torch.bool) for length in lengths]


@pytest.mark.parametrize(("reduction", "expected"), [(Reduction.TOKEN_MEAN, 1.0), (Reduction.SEQUENCE_MEAN, 2.0)])
def test_token_mean_is_one_and_sequence_mean_is_two(reduction: Reduction, expected: float) -> None:
    """Responses of lengths 1 and 3 with token losses (4) and (0, 0, 0)."""
    losses = [torch.tensor([4.0]), torch.zeros(3)]
    total = sum((row_weights(m, reduction) * x).sum() for m, x in zip(masks(1, 3), losses, strict=True))
    count = sum(row_count(mask, reduction) for mask in masks(1, 3))
    scale = term_scales(torch.tensor([float(count)]), torch.tensor([1.0]), world_size=1)
    assert scale.item() * float(total) == expected


def test_masked_tokens_leave_a_row_mean_and_empty_rows_are_not_counted() -> None:
    mask = torch.tensor([True, False, True, False])
    assert row_weights(mask, Reduction.SEQUENCE_MEAN).tolist() == [0.5, 0.0, 0.5, 0.0]
    assert row_weights(mask, Reduction.TOKEN_MEAN).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert (row_count(mask, Reduction.TOKEN_MEAN), row_count(mask, Reduction.SEQUENCE_MEAN)) == (2, 1)
    empty = torch.zeros(4, dtype=torch.bool)
    assert row_weights(empty, Reduction.SEQUENCE_MEAN).tolist() == [0.0] * 4
    assert (row_count(empty, Reduction.TOKEN_MEAN), row_count(empty, Reduction.SEQUENCE_MEAN)) == (0, 0)


def test_scales_are_coefficient_over_count_times_the_ranks_that_are_averaged_over() -> None:
    counts, coefficients = torch.tensor([10.0, 4.0, 0.0]), torch.tensor([1.0, 0.5, 3.0])
    assert term_scales(counts, coefficients, world_size=1).tolist() == pytest.approx([0.1, 0.125, 0.0])
    assert term_scales(counts, coefficients, world_size=2).tolist() == pytest.approx([0.2, 0.25, 0.0])
