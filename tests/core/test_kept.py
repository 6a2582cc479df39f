"""Distributions renormalised over ragged sets of ids."""

from __future__ import annotations

import math

import pytest
import torch

from etude.core.kept import KeptSets

SETS = [[0, 2], [1], [], [3, 0, 1], [0, 1, 2, 3]]
KEPT = KeptSets.of(torch.tensor([v for ids in SETS for v in ids], dtype=torch.int32), [len(ids) for ids in SETS])
WHOLE = slice(0, len(SETS))


def logits() -> torch.Tensor:
    return torch.randn(len(SETS), 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_masses_by_hand() -> None:
    masses = KEPT.log_mass(logits().log_softmax(-1), WHOLE).exp()
    probabilities = logits().softmax(-1)
    expected = [row[ids].sum().item() if ids else 1.0 for row, ids in zip(probabilities, SETS, strict=True)]
    assert masses.tolist() == pytest.approx(expected)


def test_rescaled_by_hand() -> None:
    probabilities = logits().softmax(-1)
    found = KEPT.renormalised(logits().log_softmax(-1), WHOLE).exp()
    for row, ids, of_token in zip(probabilities, SETS, found, strict=True):
        expected = [(row[v] / row[ids].sum()).item() for v in ids]
        assert of_token.tolist() == pytest.approx(expected + [0.0] * (4 - len(ids)))


@pytest.mark.parametrize("tokens", [slice(0, 2), slice(1, 4), slice(2, 3), slice(4, 5)])
def test_any_few_tokens_are_those_of_the_whole(tokens: slice) -> None:
    whole = logits().log_softmax(-1)
    assert KEPT.log_mass(whole[tokens], tokens).equal(KEPT.log_mass(whole, WHOLE)[tokens])


def test_no_set_at_all() -> None:
    nothing = KeptSets.of(torch.zeros(0, dtype=torch.int32), [0, 0])
    leaf = logits()[:2].requires_grad_()
    mass = nothing.log_mass(leaf.log_softmax(-1), slice(0, 2))
    assert mass.tolist() == [0.0, 0.0]


def test_gradients_against_finite_differences() -> None:
    leaf = logits().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: KEPT.log_mass(x.log_softmax(-1), WHOLE), leaf)
    kept = KeptSets.of(torch.tensor([0, 2, 3, 0, 1]), [2, 3])  # a place without an id is a constant, not a probability
    assert torch.autograd.gradcheck(lambda x: kept.renormalised(x.log_softmax(-1), slice(0, 2)).exp(), leaf[:2])


def test_what_is_impossible_has_no_mass_and_breaks_no_gradient() -> None:
    logprobs = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).log().requires_grad_()
    kept = KeptSets.of(torch.tensor([0, 2, 1, 2]), [2, 2])
    mass = kept.log_mass(logprobs, slice(0, 2))
    assert mass[0].exp().item() == pytest.approx(0.5)
    assert mass[1].item() < -9000  # nothing that is kept is possible: a number all the same
    (mass[0] + kept.renormalised(logprobs, slice(0, 2)).sum()).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_they_move_to_another_device_without_their_lengths() -> None:
    moved = KEPT.to("meta")
    assert moved.ids_M.device.type == "meta"
    assert (moved.lengths, moved.starts) == ((2, 1, 0, 3, 4), (0, 2, 3, 3, 6, 10))
    assert math.prod(KEPT.ids_M.shape) == KEPT.starts[-1]
