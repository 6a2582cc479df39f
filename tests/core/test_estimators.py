"""The drawn token's forms, returns, ratios and clips: hand values, and expected gradients by enumeration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from etude.axes.names import Form, Importance
from etude.core.estimators import clipped, form_value, importance_ratio, log_ratio, policy_gradient, returns

# The worked example: three drawn tokens with q = .5, .4, .3 under the student and p = .5, .1, .6 under the teacher.
RATIOS = torch.tensor([0.0, 1.386294, -0.693147])

FORWARD_KL_ROW = [-0.375, 0.25, 0.125, 0.0]
REVERSE_KL_ROW = [-0.216608, 0.173287, 0.086643, -0.043322]
ZERO_ROW = [0.0, 0.0, 0.0, 0.0]


# The worked example -------------------------------------------------------------------------------------------------


def test_log_ratio_of_the_worked_example() -> None:
    student, teacher = torch.tensor([0.5, 0.4, 0.3]).log(), torch.tensor([0.5, 0.1, 0.6]).log()
    c = log_ratio(student_logprobs=student, teacher_logprobs=teacher)
    torch.testing.assert_close(c, RATIOS, atol=1e-6, rtol=0)
    assert c.sum().item() == pytest.approx(0.693147, abs=1e-6)
    assert c.mean().item() == pytest.approx(0.231049, abs=1e-6)


@pytest.mark.parametrize(
    ("form", "expected", "total"),
    [
        (Form.K1, [0.0, 1.386294, -0.693147], 0.693147),
        (Form.K2, [0.0, 0.960906, 0.240227], 1.201133),
        (Form.K3, [0.0, 0.636294, 0.306853], 0.943147),
    ],
)
def test_forms_of_the_worked_example(form: Form, expected: list[float], total: float) -> None:
    values = form_value(RATIOS, form)
    torch.testing.assert_close(values, torch.tensor(expected), atol=1e-6, rtol=0)
    assert values.sum().item() == pytest.approx(total, abs=2e-6)


@pytest.mark.parametrize(
    ("discount", "expected"),
    [
        (0.0, [0.0, -1.386294, 0.693147]),
        (0.5, [-0.519860, -1.039721, 0.693147]),
        (1.0, [-0.693147, -0.693147, 0.693147]),
    ],
)
def test_returns_of_the_worked_example(discount: float, expected: list[float]) -> None:
    torch.testing.assert_close(returns(-RATIOS, discount), torch.tensor(expected), atol=1e-6, rtol=0)


def test_returns_equal_their_double_sum_and_leave_the_rewards_alone() -> None:
    rewards = torch.randn(9, dtype=torch.float64)
    kept = rewards.clone()
    for discount in (0.0, 0.3, 0.9, 1.0):
        found = returns(rewards, discount)
        expected = [sum(discount ** (u - t) * rewards[u].item() for u in range(t, 9)) for t in range(9)]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(rewards, kept)


@pytest.mark.parametrize("discount", [-0.1, 1.1])
def test_a_discount_out_of_range_is_refused(discount: float) -> None:
    with pytest.raises(ValueError, match="expected 0"):
        returns(-RATIOS, discount)


# Expected gradients -------------------------------------------------------------------------------------------------


def expected_gradient(student: list[float], teacher: list[float], loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Sum over the drawn token y, with its probability, of the gradient of loss(log q(y), log p(y)) on the logits."""
    logits = torch.tensor(student, dtype=torch.float64).log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    values = loss(logprobs, torch.tensor(teacher, dtype=torch.float64).log())
    probabilities = logprobs.exp().detach()  # who draws is not differentiated
    return torch.autograd.grad((probabilities * values).sum(), logits)[0]


def differentiated(form: Form) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda q, p: form_value(log_ratio(student_logprobs=q, teacher_logprobs=p), form)


def as_reward(form: Form, baseline: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(q: Tensor, p: Tensor) -> Tensor:
        reward = -form_value(log_ratio(student_logprobs=q.detach(), teacher_logprobs=p), form)
        return policy_gradient(
            student_logprobs=q, behaviour_logprobs=q.detach(), advantages=reward - baseline, importance=Importance.NONE
        )

    return loss


def state_kl_as_advantage(q: Tensor, p: Tensor) -> Tensor:
    state_kl = (q.exp() * (q - p)).sum().detach()
    return policy_gradient(
        student_logprobs=q,
        behaviour_logprobs=q.detach(),
        advantages=-state_kl.expand_as(q),
        importance=Importance.NONE,
    )


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (as_reward(Form.K1), REVERSE_KL_ROW),
        (as_reward(Form.K1, baseline=3.0), REVERSE_KL_ROW),
        (differentiated(Form.K2), REVERSE_KL_ROW),
        (differentiated(Form.K1), ZERO_ROW),
        (differentiated(Form.K3), FORWARD_KL_ROW),
        (as_reward(Form.K3), [0.158392, -0.076713, -0.038357, -0.043322]),
        (state_kl_as_advantage, ZERO_ROW),
    ],
    ids=["k1 reward", "k1 reward, baseline", "k2 loss", "k1 loss", "k3 loss", "k3 reward", "state kl"],
)
def test_expected_gradient_on_the_student_logits(
    loss: Callable[[Tensor, Tensor], Tensor], expected: list[float]
) -> None:
    found = expected_gradient([0.125, 0.5, 0.25, 0.125], [0.5, 0.25, 0.125, 0.125], loss)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_uniform_student() -> None:
    """A uniform student over three tokens: advantage form right, naive form nothing, k3 the other divergence."""
    student, teacher = [1 / 3, 1 / 3, 1 / 3], [0.7, 0.2, 0.1]
    for loss, expected in (
        (as_reward(Form.K1), [-0.35541, 0.06218, 0.29323]),
        (differentiated(Form.K1), [0.0, 0.0, 0.0]),
        (differentiated(Form.K3), [-0.36667, 0.13333, 0.23333]),
    ):
        found = expected_gradient(student, teacher, loss)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=6e-6, rtol=0)


# Importance ---------------------------------------------------------------------------------------------------------

# ratio, advantage, and whether a clip of 0.2 holds the token where it is
CLIP_CASES = [
    (1.0, 1.0, False),
    (1.0, -1.0, False),
    (1.5, 1.0, True),  # already more likely than wanted
    (1.5, -1.0, False),  # more likely, and unwanted: must come back
    (0.5, 1.0, False),
    (0.5, -1.0, True),
    (1.1, 1.0, False),
    (0.9, -1.0, False),
    (1.5, 0.0, False),
    (0.5, 0.0, False),
]


def test_ratio_is_student_over_behaviour() -> None:
    ratio = importance_ratio(
        student_logprobs=torch.tensor([0.5, 0.4]).log(), behaviour_logprobs=torch.tensor([0.25, 0.8]).log()
    )
    torch.testing.assert_close(ratio, torch.tensor([2.0, 0.5]))


@pytest.mark.parametrize(("ratio", "advantage", "held"), CLIP_CASES)
def test_ppo_clip_by_hand(ratio: float, advantage: float, held: bool) -> None:
    student = torch.tensor([0.3], dtype=torch.float64).log().requires_grad_()
    term = policy_gradient(
        student_logprobs=student,
        behaviour_logprobs=torch.tensor([0.3 / ratio], dtype=torch.float64).log(),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        importance=Importance.PPO_CLIP,
        clip=0.2,
    )
    bounded = min(max(ratio, 0.8), 1.2)
    assert term.item() == pytest.approx(-min(advantage * ratio, advantage * bounded))
    gradient = torch.autograd.grad(term.sum(), student)[0].item()
    assert gradient == pytest.approx(0.0 if held else -advantage * ratio)
    told = clipped(ratio=torch.tensor([ratio]), advantages=torch.tensor([advantage]), clip=0.2)
    assert told.tolist() == [held]


def test_ratio_gradient_by_hand() -> None:
    student = torch.tensor([0.3, 0.6], dtype=torch.float64).log().requires_grad_()
    term = policy_gradient(
        student_logprobs=student,
        behaviour_logprobs=torch.tensor([0.6, 0.2], dtype=torch.float64).log(),
        advantages=torch.tensor([2.0, -1.0], dtype=torch.float64),
        importance=Importance.RATIO,
    )
    assert term.tolist() == pytest.approx([-1.0, 3.0])
    assert torch.autograd.grad(term.sum(), student)[0].tolist() == pytest.approx([-1.0, 3.0])


def test_misuse_is_refused() -> None:
    q = torch.zeros(2)
    with pytest.raises(ValueError, match="must be detached"):
        policy_gradient(
            student_logprobs=q,
            behaviour_logprobs=q,
            advantages=torch.ones(2, requires_grad=True),
            importance=Importance.NONE,
        )
    for importance, clip in ((Importance.RATIO, 0.2), (Importance.NONE, 0.2), (Importance.PPO_CLIP, None)):
        with pytest.raises(ValueError, match="a clip goes with 'ppo_clip'"):
            policy_gradient(student_logprobs=q, behaviour_logprobs=q, advantages=q, importance=importance, clip=clip)
