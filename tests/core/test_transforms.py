"""Targets of two models: golden values, limits by hand, and nothing that is not a number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from etude.core.divergences import LOG_OF_ZERO
from etude.core.transforms import extrapolated

P, Q = (torch.tensor(x, dtype=torch.float64).log() for x in ([0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]))
EVEN = torch.full((4,), 0.25, dtype=torch.float64).log()


def near(values: Tensor, expected: object) -> bool:
    return torch.allclose(values, torch.as_tensor(expected, dtype=values.dtype), atol=1e-5)


def test_the_published_power_away_from_an_even_reference() -> None:
    target = extrapolated(teacher_logprobs=P, reference_logprobs=EVEN, extrapolation=1.25)
    assert near(target - Q, [1.559581, -0.693147, -0.866434, -0.173287])  # the drawn tokens' advantages
    assert near(target.softmax(-1), [0.563697, 0.237006, 0.099649, 0.099649])


def test_powers_by_hand() -> None:
    assert near(extrapolated(teacher_logprobs=P, reference_logprobs=EVEN, extrapolation=1.0), P)
    squared = extrapolated(teacher_logprobs=P, reference_logprobs=EVEN, extrapolation=2.0).exp()
    assert near(squared, [1.0, 0.25, 0.0625, 0.0625])  # p^2 / (1/4)
    halfway = extrapolated(teacher_logprobs=P, reference_logprobs=EVEN, extrapolation=0.5).exp()
    assert near(halfway, (P.exp() * 0.25).sqrt())  # the geometric mean
    assert near(extrapolated(teacher_logprobs=P, reference_logprobs=P, extrapolation=7.0), P)


def test_what_is_ruled_out() -> None:
    """In the order: by both, by the teacher, by the reference, by nobody."""
    hole = torch.tensor([0.0, 0.0, 0.5, 0.5]).log()
    reference = torch.tensor([0.0, 0.5, 0.0, 0.5]).log()
    beyond = extrapolated(teacher_logprobs=hole, reference_logprobs=reference, extrapolation=1.25)
    assert beyond.isfinite().all()
    assert beyond[0] == LOG_OF_ZERO
    assert beyond.softmax(-1).tolist() == [0.0, 0.0, 1.0, 0.0]
    between = extrapolated(teacher_logprobs=hole, reference_logprobs=reference, extrapolation=0.5)
    assert between.softmax(-1).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_half_precision_is_computed_in_float32() -> None:
    made = extrapolated(teacher_logprobs=P.bfloat16(), reference_logprobs=EVEN.bfloat16(), extrapolation=1.25)
    assert made.dtype == torch.float32
    assert extrapolated(teacher_logprobs=P, reference_logprobs=EVEN, extrapolation=1.25).dtype == torch.float64


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="the extrapolation is 0.0; expected the teacher's power, above 0"):
        extrapolated(teacher_logprobs=P, reference_logprobs=EVEN, extrapolation=0.0)
    with pytest.raises(ValueError, match=r"shape \(4,\) and the reference's \(3,\); expected the same"):
        extrapolated(teacher_logprobs=P, reference_logprobs=EVEN[:3], extrapolation=1.25)
