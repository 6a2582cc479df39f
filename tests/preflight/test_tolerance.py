from __future__ import annotations

from itertools import pairwise

import torch

from etude.preflight.tolerance import TOLERANCE, size_of


def test_mean_and_largest_both_hold() -> None:
    exact = TOLERANCE[torch.float32]
    assert exact.holds(torch.tensor([1e-4, -1e-4]))
    assert not exact.holds(torch.tensor([2e-3, -2e-3]))  # the mean of the sizes, not of the gaps
    assert exact.holds(torch.cat([torch.zeros(99), torch.tensor([0.04])]))
    assert not exact.holds(torch.cat([torch.zeros(999), torch.tensor([0.1])]))
    assert not exact.holds(torch.tensor([float("nan")]))


def test_coarser_precisions_allow_more() -> None:
    order = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    for finer, coarser in pairwise(order):
        for name in ("mean", "largest", "divergence", "gradient"):
            assert getattr(TOLERANCE[finer], name) < getattr(TOLERANCE[coarser], name)


def test_figures() -> None:
    assert size_of(torch.tensor([-3.0, 1.0])) == {"mean": 2.0, "largest": 3.0}
