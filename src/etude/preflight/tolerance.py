"""How far two computations of one number may lie apart, by the precision they were made in.

What sets the size is the rounding of a logit. One of size 20 is off by up to 1e-6 in float32, 0.01 in float16 and in
TF32 (10 bits of fraction), 0.06 in bfloat16 (7 bits); layers and softmax add some of them up, and a kernel chosen for
another batch adds them up in another order. The tables allow about three times that for the mean over tokens and a
multiple of it for the worst token; float32 is given room for TF32's worst token. A forgotten shift, dropout or another
position moves scores by tenths to whole nats: far above the first three rows, still above bfloat16's.

Published: between a trainer and a sampler of another engine in bfloat16 a KL of 4e-4 to 1e-2 nats a token is usual
(reports on training-inference mismatch in RL, 2025-2026), which is a mean gap of about 0.03 to 0.1. Measured here: see
docs/preflight.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from etude.models.roles import AbstractBackbone


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What is called equal."""

    mean: float  # nats a token, the mean over tokens of the size of a gap in log-probability
    largest: float  # nats, of any one token
    divergence: float  # nats a token, between two distributions that should be one: about half the mean gap squared
    gradient: float  # relative size of a gradient's error, against float64

    def holds(self, gaps_N: Tensor) -> bool:
        """Whether gaps of log-probabilities are rounding."""
        return bool(gaps_N.isfinite().all()) and _mean(gaps_N) <= self.mean and _largest(gaps_N) <= self.largest


TOLERANCE = {
    torch.float64: Tolerance(mean=1e-6, largest=1e-5, divergence=1e-9, gradient=1e-4),  # heads and marks are float32
    torch.float32: Tolerance(mean=1e-3, largest=5e-2, divergence=1e-5, gradient=1e-3),
    torch.float16: Tolerance(mean=3e-2, largest=0.3, divergence=1e-3, gradient=1e-2),
    torch.bfloat16: Tolerance(mean=0.1, largest=1.0, divergence=2e-2, gradient=3e-2),
}


def tolerance_of(*backbones: AbstractBackbone) -> Tolerance:
    """That of the coarsest precision among the weights and the matrix products of these models."""
    found = {next(backbone.parameters()).dtype for backbone in backbones}
    found |= {getattr(backbone, "compute_dtype", torch.float64) for backbone in backbones}
    return max((TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]) for dtype in found), key=lambda one: one.mean)


def _mean(gaps_N: Tensor) -> float:
    return gaps_N.abs().double().mean().item()


def _largest(gaps_N: Tensor) -> float:
    return gaps_N.abs().max().item()


def size_of(gaps_N: Tensor) -> dict[str, float]:
    """Mean and largest size of gaps, as figures of a finding."""
    return {"mean": _mean(gaps_N), "largest": _largest(gaps_N)}
