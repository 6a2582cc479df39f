"""Counting trainable tokens, and the only division of a loss.

A term's loss is its sum over the tokens of the *whole optimiser step* divided by one count, taken over all
micro-batches and ranks before the first backward. So the gradient does not depend on how the step was cut up.
Micro-batches of 1 token (loss 10) and 9 tokens (loss 1 each) give 19 / 10 = 1.9; the mean of their means would be 5.5.

    >>> scales = term_scales(torch.tensor([10.0]), torch.tensor([1.0]), world_size=1)
    >>> scales * 10.0 + scales * 9.0
    tensor([1.9000])

Legend: J terms, C completion tokens of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.axes.names import Reduction


def row_weights(mask_C: Tensor, reduction: Reduction) -> Tensor:
    """[C] float32: the mask; under `sequence_mean` divided by the row's own number of trained tokens.

    >>> row_weights(torch.tensor([True, True, False, True]), Reduction.SEQUENCE_MEAN)
    tensor([0.3333, 0.3333, 0.0000, 0.3333])
    """
    values_C = mask_C.to(torch.float32)
    if reduction is Reduction.SEQUENCE_MEAN:
        values_C = values_C / mask_C.sum().clamp(min=1)
    return values_C


def row_count(mask_C: Tensor, reduction: Reduction) -> int:
    """What a row adds to the term's count: its trained tokens, or one if it has any (`sequence_mean`).

    Under `sum` tokens are counted as well, to know whether anything is trained; nothing is divided by them.

    Responses of lengths 1 and 3 with token losses (4) and (0, 0, 0): the token mean is 4 / 4 = 1, the sequence mean
    (4 + 0) / 2 = 2.
    """
    tokens = int(mask_C.sum())
    return min(tokens, 1) if reduction is Reduction.SEQUENCE_MEAN else tokens


def term_scales(counts_J: Tensor, coefficients_J: Tensor, world_size: int) -> Tensor:
    """[J] what each term's sum is multiplied by: coefficient / count. The only division of a loss.

    `counts_J` are already summed over ranks; data-parallel wrappers then average gradients over `world_size` ranks,
    which is undone here, once. A term without a trainable token in the step has scale zero.
    """
    scales_J = torch.where(counts_J > 0, coefficients_J / counts_J.clamp(min=1), 0.0)
    return scales_J * world_size
