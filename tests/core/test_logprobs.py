"""The real-vocabulary cut, the loss temperature, and the only shift."""

from __future__ import annotations

import pytest
import torch

from etude.core.divergences import forward_kl, reverse_kl
from etude.core.logprobs import cut_filler, next_token_logprobs, pick, predicted_from


def test_filler_columns_would_take_nearly_everything() -> None:
    logits = torch.tensor([-5.0, -6.0, -7.0, -8.0, 0.0, 0.0, 0.0, 0.0])
    assert logits.softmax(-1)[4:].sum().item() == pytest.approx(0.9974, abs=1e-4)
    expected = torch.tensor([0.643914, 0.236883, 0.087144, 0.032059])  # softmax of 3, 2, 1, 0
    torch.testing.assert_close(cut_filler(logits, 4).softmax(-1), expected, atol=1e-6, rtol=0)


def test_a_cut_that_cannot_be_made_is_refused() -> None:
    assert cut_filler(torch.zeros(2, 4), 4).shape == (2, 4)
    with pytest.raises(ValueError, match="3 columns for a vocabulary of 4 ids"):
        cut_filler(torch.zeros(2, 3), 4)


@pytest.mark.parametrize(("temperature", "forward", "reverse"), [(1.0, 1.905177, 1.992436), (2.0, 0.617025, 0.569304)])
def test_temperature_applies_to_both_and_has_no_factor(temperature: float, forward: float, reverse: float) -> None:
    student = next_token_logprobs(torch.tensor([2.0, 1.0, 0.0]), temperature)
    teacher = next_token_logprobs(torch.tensor([0.0, 0.0, 3.0]), temperature)
    assert forward_kl(student_logprobs=student, teacher_logprobs=teacher).item() == pytest.approx(forward, abs=1e-6)
    assert reverse_kl(student_logprobs=student, teacher_logprobs=teacher).item() == pytest.approx(reverse, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_log_softmax_is_in_float32_at_least(given: torch.dtype, computed: torch.dtype) -> None:
    logits = torch.randn(5, 300).to(given)
    result = next_token_logprobs(logits, 0.7)
    assert result.dtype is computed
    expected = (logits.double() / 0.7).log_softmax(-1)
    torch.testing.assert_close(result.double(), expected, atol=1e-5 if computed is torch.float32 else 1e-12, rtol=0)


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"), [(1, 1, [0]), (3, 2, [2, 3]), (2, 4, [1, 2, 3, 4]), (5, 1, [4])]
)
def test_completion_token_j_is_predicted_at_prompt_plus_j_minus_one(
    prompt: int, completion: int, expected: list[int]
) -> None:
    assert predicted_from(prompt, completion).tolist() == expected


def test_pick_takes_one_id_a_row_with_its_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]], requires_grad=True)
    chosen = pick(logprobs, torch.tensor([2, 0]))
    assert chosen.tolist() == [-3.0, -4.0]
    chosen.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
