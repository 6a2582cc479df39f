"""Targets made of two models: what the student is compared with, where that is not the teacher as it stands.

Log-probabilities of teacher and reference go in, those of the target come out; `core.tile` and `core.advantages` put
them in the teacher's place. It knows no term, no student and no divergence.

The running example: teacher p = (1/2, 1/4, 1/8, 1/8), reference (1/4, 1/4, 1/4, 1/4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.core.divergences import LOG_OF_ZERO


def extrapolated(*, teacher_logprobs: Tensor, reference_logprobs: Tensor, extrapolation: float) -> Tensor:
    """lambda log p + (1 - lambda) log ref: the log of p^lambda ref^(1 - lambda), not scaled to sum to one.

    lambda > 1 goes on in the direction in which the teacher differs from the reference, lambda < 1 stops on the way.
    Over the whole vocabulary `log_softmax` scales it. Of drawn tokens alone the scale log Z of their state is unknown,
    and not needed where the rest is a detached advantage or k2: a number that knows nothing of the draw moves no
    expected gradient.

    >>> p, ref = torch.tensor([0.5, 0.25, 0.125, 0.125]).log(), torch.full((4,), 0.25).log()
    >>> target = extrapolated(teacher_logprobs=p, reference_logprobs=ref, extrapolation=1.25)
    >>> [round(x, 6) for x in target.softmax(-1).tolist()]
    [0.563697, 0.237006, 0.099649, 0.099649]
    >>> q = torch.tensor([0.125, 0.5, 0.25, 0.125]).log()
    >>> [round(x, 6) for x in (target - q).tolist()]  # each token's advantage
    [1.559581, -0.693147, -0.866434, -0.173287]

    A log-probability of minus infinity counts as `LOG_OF_ZERO`: what neither model says stays impossible, and what the
    reference alone rules out is next to certain in the limit.

    Args:
        teacher_logprobs: any shape.
        reference_logprobs: the same shape.
        extrapolation: lambda, above 0.

    Returns:
        The same shape, float32 at least, nats.

    Raises:
        ValueError: shapes that differ, or lambda not above 0.

    Reference: arXiv 2602.12125 (G-OPD, ExOPD), which takes lambda = 1.25.
    """
    if teacher_logprobs.shape != reference_logprobs.shape:
        raise ValueError(
            f"the teacher's log-probabilities have shape {tuple(teacher_logprobs.shape)} and the reference's "
            f"{tuple(reference_logprobs.shape)}; expected the same tokens and ids"
        )
    if not extrapolation > 0.0:
        raise ValueError(f"the extrapolation is {extrapolation}; expected the teacher's power, above 0")
    dtype = torch.promote_types(torch.float32, torch.promote_types(teacher_logprobs.dtype, reference_logprobs.dtype))
    teacher, reference = (x.to(dtype).clamp(min=LOG_OF_ZERO) for x in (teacher_logprobs, reference_logprobs))
    return reference + extrapolation * (teacher - reference)
